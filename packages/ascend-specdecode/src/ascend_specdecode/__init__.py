"""Exact draft-verify speculative decoding for any target and drafter."""

from ascend_specdecode.adaptive.config import AdaptiveConfig
from ascend_specdecode.adaptive.controller import SpeculationReport
from ascend_specdecode.choices import Choice, ExponentialRace, InverseCdf, inverse_cdf
from ascend_specdecode.errors import (
    ArgumentError,
    DrafterError,
    EngineClosedError,
    ProtocolError,
    QueueFullError,
    SpecDecodeError,
    TargetError,
)
from ascend_specdecode.ngram import (
    NgramDrafter,
    NgramMatch,
    TokenSequence,
    find_ngram,
    propose_ngram,
)
from ascend_specdecode.observability.statistics import Histogram, Statistics
from ascend_specdecode.observability.trace import Lane, Span, Trace
from ascend_specdecode.orchestrator.config import EngineConfig, Mode, WhenFull
from ascend_specdecode.orchestrator.engine import Completion, DraftVerify, Load
from ascend_specdecode.orchestrator.generation import Generation
from ascend_specdecode.parameters import GREEDY, SamplingParameters
from ascend_specdecode.penalties import TokenCounts, apply_penalties
from ascend_specdecode.protocols import (
    NOTHING,
    DraftedSequence,
    Drafter,
    ObservingDrafter,
    Proposal,
    Sampler,
    Scores,
    Target,
    Verifier,
)
from ascend_specdecode.random_streams import Purpose, uniforms
from ascend_specdecode.rejection import rejection_sample, rejection_sample_with
from ascend_specdecode.requests import (
    Cancelled,
    CancelReason,
    Ending,
    Event,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    Request,
    Tokens,
)
from ascend_specdecode.sampling import (
    GreedySampler,
    LogitsSampler,
    apply_logit_bias,
    apply_top_k,
    apply_top_p,
    shaped_probabilities,
)
from ascend_specdecode.sequences import SequenceOrigin, SequenceState, TokenBuffer
from ascend_specdecode.trees import (
    ROOT,
    DraftTree,
    TreeVerification,
    distinct_sibling_probs,
    rejection_sample_tree,
    rejection_sample_tree_with,
    verify_tree_greedy,
)
from ascend_specdecode.typical import InexactVerification, typical_acceptance_inexact
from ascend_specdecode.verification import PAD_TOKEN, verify_greedy
from ascend_specdecode.verifiers import ExactVerifier, InexactTypicalVerifier

__all__ = [
    "GREEDY",
    "NOTHING",
    "PAD_TOKEN",
    "ROOT",
    "AdaptiveConfig",
    "ArgumentError",
    "CancelReason",
    "Cancelled",
    "Choice",
    "Completion",
    "DraftTree",
    "DraftVerify",
    "DraftedSequence",
    "Drafter",
    "DrafterError",
    "Ending",
    "EngineClosedError",
    "EngineConfig",
    "Event",
    "ExactVerifier",
    "ExponentialRace",
    "FailReason",
    "Failed",
    "FinishReason",
    "Finished",
    "Generation",
    "GreedySampler",
    "Histogram",
    "InexactTypicalVerifier",
    "InexactVerification",
    "InverseCdf",
    "Lane",
    "Load",
    "LogitsSampler",
    "Mode",
    "NgramDrafter",
    "NgramMatch",
    "ObservingDrafter",
    "Proposal",
    "ProtocolError",
    "Purpose",
    "QueueFullError",
    "Request",
    "Sampler",
    "SamplingParameters",
    "Scores",
    "SequenceOrigin",
    "SequenceState",
    "Span",
    "SpecDecodeError",
    "SpeculationReport",
    "Statistics",
    "Target",
    "TargetError",
    "TokenBuffer",
    "TokenCounts",
    "TokenSequence",
    "Tokens",
    "Trace",
    "TreeVerification",
    "Verifier",
    "WhenFull",
    "apply_logit_bias",
    "apply_penalties",
    "apply_top_k",
    "apply_top_p",
    "distinct_sibling_probs",
    "find_ngram",
    "inverse_cdf",
    "propose_ngram",
    "rejection_sample",
    "rejection_sample_tree",
    "rejection_sample_tree_with",
    "rejection_sample_with",
    "shaped_probabilities",
    "typical_acceptance_inexact",
    "uniforms",
    "verify_greedy",
    "verify_tree_greedy",
]

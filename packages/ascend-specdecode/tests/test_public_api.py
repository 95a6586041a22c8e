from __future__ import annotations

import subprocess
import sys

import ascend_specdecode

PUBLIC_NAMES = {
    "AdaptiveConfig",
    "AdaptiveK",
    "ArgumentError",
    "BlockDrafter",
    "BlockModel",
    "CancelReason",
    "Cancelled",
    "Choice",
    "Completion",
    "DraftDraws",
    "DraftInput",
    "DraftModel",
    "DraftOutput",
    "DraftTree",
    "DraftVerify",
    "DraftVocabulary",
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
    "FirstDrafter",
    "FixedK",
    "GREEDY",
    "Generation",
    "GreedySampler",
    "HiddenStateDrafter",
    "HiddenStateModel",
    "Histogram",
    "InexactTypicalVerifier",
    "InexactVerification",
    "InverseCdf",
    "Lane",
    "Load",
    "LogitsSampler",
    "MissingExtraError",
    "Mode",
    "ModelDrafter",
    "NOTHING",
    "NgramDrafter",
    "NgramIndex",
    "NgramMatch",
    "ObservingDrafter",
    "PAD_TOKEN",
    "PromptLookupDrafter",
    "Proposal",
    "ProtocolError",
    "Purpose",
    "QueueFullError",
    "ROOT",
    "RaceDrafter",
    "Request",
    "Sampler",
    "SamplingParameters",
    "Scores",
    "SequenceOrigin",
    "SequenceState",
    "SizedTarget",
    "Span",
    "SpecDecodeError",
    "SpeculationReport",
    "Statistics",
    "StepRecord",
    "SuffixAutomaton",
    "SuffixDrafter",
    "Summary",
    "Target",
    "TargetError",
    "TokenBuffer",
    "TokenCounts",
    "TokenSequence",
    "Tokens",
    "Trace",
    "TreeDrafter",
    "TreeOfDrafts",
    "TreeTarget",
    "TreeVerification",
    "TreeVerifier",
    "Verifier",
    "WhenFull",
    "apply_logit_bias",
    "apply_penalties",
    "apply_top_k",
    "apply_top_p",
    "distinct_sibling_probs",
    "find_ngram",
    "inverse_cdf",
    "live_progress",
    "prometheus_collector",
    "propose_ngram",
    "rejection_sample",
    "rejection_sample_logits",
    "rejection_sample_tree",
    "rejection_sample_tree_with",
    "rejection_sample_with",
    "shaped_probabilities",
    "typical_acceptance_inexact",
    "uniforms",
    "verify_greedy",
    "verify_tree_greedy",
}


def test_exported_names_are_exactly_these() -> None:
    assert set(ascend_specdecode.__all__) == PUBLIC_NAMES
    assert all(hasattr(ascend_specdecode, name) for name in PUBLIC_NAMES)


def test_public_functions_and_classes_have_docstrings() -> None:
    for name in PUBLIC_NAMES - {"PAD_TOKEN", "ROOT", "TokenSequence"}:
        assert getattr(ascend_specdecode, name).__doc__, name


def test_import_brings_no_engine_and_no_device_library() -> None:
    code = (
        "import sys, ascend_specdecode; "
        "print(sorted({'vllm', 'torch_npu', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""DFlash2 drafts on the V1 model runner.

vLLM refuses them there: `DFlashProposer`, the V1 drafter, would take the best token of every
position on its own, and a DFlash2 draft is trained to have its candidates scored in pairs. The
scoring is part of the draft model (`CandidateSelector`); what V1 lacks is the walk along the best
pairs, which only the V2 speculator has (vllm/v1/worker/gpu/spec_decode/dflash2/speculator.py).

Two changes: the refusal is dropped, and the V1 drafter walks. The layout of the queries, one anchor
and k masks per request, is the same in both runners, and so the drafts are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm_plugin.compat import DFLASH2_ARCHITECTURE

REFUSALS = ("dflash2 drafts", "DFlash candidate-head drafts")
"""What `VllmConfig._get_v1_model_runner_unsupported_features` calls them, in 0.30 and since 0.31.

The second is said of another kind of draft, too (LiLiCorr), which stays refused.
"""

_Choose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def apply() -> bool:
    """Drop the refusal, and make the V1 drafter select candidates; always needed."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    allow_configuration()
    original = DFlashProposer._sample_draft_tokens
    if not getattr(original, "selects_candidates", False):
        DFlashProposer._sample_draft_tokens = _selecting(original)  # type: ignore[method-assign]
    return True


def allow_configuration() -> None:
    """Drop the refusal alone; vLLM checks a configuration long before there is a drafter."""
    from vllm.config import VllmConfig

    original = VllmConfig._get_v1_model_runner_unsupported_features
    if getattr(original, "takes_dflash2", False):
        return

    def unsupported(self: Any) -> list[str]:
        features: list[str] = original(self)
        if not has_dflash2_draft(self.speculative_config):
            return features
        return [feature for feature in features if feature not in REFUSALS]

    unsupported.takes_dflash2 = True  # type: ignore[attr-defined]
    VllmConfig._get_v1_model_runner_unsupported_features = unsupported  # type: ignore[method-assign]


def has_dflash2_draft(speculative_config: Any) -> bool:
    """Whether the draft of a configuration is one that selects among candidates."""
    draft = getattr(speculative_config, "draft_model_config", None)
    return draft is not None and DFLASH2_ARCHITECTURE in (draft.architectures or ())


def _selecting(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(self: Any, hidden_states: torch.Tensor, sampling_metadata: Any) -> Any:
        if DFLASH2_ARCHITECTURE in self.draft_model_config.architectures:
            return sample_draft_tokens(self, hidden_states, sampling_metadata)
        return original(self, hidden_states, sampling_metadata)

    sample.selects_candidates = True  # type: ignore[attr-defined]
    return sample


def sample_draft_tokens(
    proposer: Any, hidden_states: torch.Tensor, sampling_metadata: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `DFlashProposer._sample_draft_tokens` gives, with the candidates of DFlash2.

    Args:
        proposer: vLLM's V1 drafter after the draft model ran.
        hidden_states: [batch * k, hidden], the mask positions, request by request.
        sampling_metadata: of the batch; only the temperatures matter, and only when vLLM wants
            the probabilities that the drafts were drawn with.

    Returns:
        Drafts [batch * k], and their probabilities [batch * k, vocabulary] or None for greedy.
    """
    k = proposer.num_speculative_tokens
    batch, stride = hidden_states.shape[0] // k, k + 1
    candidates, unary = proposer.model.compute_candidates(hidden_states)
    candidates, unary = candidates.view(batch, k, -1), unary.view(batch, k, -1)
    scores = proposer.model.model.candidate_selector(
        candidates,
        unary,
        hidden_states.view(batch, k, -1),
        proposer.input_ids[: batch * stride : stride].long(),
    )
    choose: _Choose = best
    if proposer._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy:
        choose = _drawn(sampling_metadata, proposer.use_fp64_gumbel)
    tokens, probabilities = walk(candidates, scores, choose)
    if probabilities is None:
        return tokens.flatten(), None
    vocabulary = proposer.vllm_config.model_config.get_vocab_size()
    spread = probabilities.new_zeros(batch, k, vocabulary)
    spread.scatter_(-1, candidates, probabilities)
    return tokens.flatten(), spread.flatten(0, 1)


def walk(
    candidates: torch.Tensor, scores: torch.Tensor, choose: _Choose
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choose a candidate for each step, each by its scores beside the one chosen before.

    Args:
        candidates: [batch, k, top_k] int64 tokens.
        scores: [batch, k, top_k, top_k]; [b, step, p, c] is the score of candidate c after the
            candidate p of the step before. In step 0 every p is the anchor.
        choose: from scores [batch, top_k] to indices [batch], and the probabilities [batch, top_k]
            that they were drawn with, or None.

    Returns:
        Tokens [batch, k], and probabilities [batch, k, top_k] or None.
    """
    rows = torch.arange(candidates.shape[0], device=candidates.device)
    previous = torch.zeros_like(rows)
    tokens, drawn = [], []
    for step in range(candidates.shape[1]):
        previous, probabilities = choose(scores[rows, step, previous].float())
        tokens.append(candidates[rows, step, previous])
        drawn.append(probabilities)
    known = [probabilities for probabilities in drawn if probabilities is not None]
    return torch.stack(tokens, 1), torch.stack(known, 1) if known else None


def best(scores: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The greedy choice: indices [batch] of the best scores [batch, top_k]."""
    return scores.argmax(dim=-1), None


def _drawn(sampling_metadata: Any, use_fp64: bool) -> _Choose:
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

    return lambda scores: compute_probs_and_sample_next_token(scores, sampling_metadata, use_fp64)

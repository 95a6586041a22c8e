"""Verification of drafts on an NPU, in torch.

vLLM's rejection sampler launches four Triton kernels. On a CPU C++ kernels take their place, for an
NPU there are none. These compute the same from whole tensors, and the host reads nothing: rows are
requests, columns are the places of a request's drafts, and a place counts while every place before
it was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from ascend_vllm_plugin.patches.kernel_dispatchers import (
    LaunchableFunction,
    expand,
    install_kernel,
)


@attrs.frozen
class _Places:
    """Where the drafts of each request are.

    Attributes:
        index: [batch_size, max_spec_len] int64, into the flat drafts; of no account beyond.
        counts: [batch_size, 1] drafts of each request.
        columns: [1, max_spec_len + 1].
    """

    index: torch.Tensor
    counts: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, cu_num_draft_tokens: torch.Tensor, max_spec_len: int, drafts: int) -> _Places:
        ends = cu_num_draft_tokens.long()
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).unsqueeze(1)
        columns = torch.arange(max_spec_len + 1, device=ends.device).unsqueeze(0)
        index = (ends.unsqueeze(1) - counts + columns[:, :-1]).clamp(max=drafts - 1)
        return cls(index, counts, columns)

    def write(
        self,
        output: torch.Tensor,
        tokens: torch.Tensor,
        accepted: torch.Tensor,
        bonus: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> None:
        """Write each request's tokens up to its first rejection, and its bonus without one.

        Args:
            output: [batch_size, max_spec_len + 1], in place; other elements stay.
            tokens: [batch_size, max_spec_len] what to write at each place.
            accepted: [batch_size, max_spec_len] bool.
            bonus: [batch_size, 1].
            rows: [batch_size] bool, requests that are concerned; None: all.
        """
        inside = self.columns[:, :-1] < self.counts
        run = (accepted & inside).int().cumprod(1).sum(1, keepdim=True)
        written = (self.columns < self.counts) & (self.columns <= run)
        at_bonus = (self.columns == self.counts) & (run == self.counts)
        if rows is not None:
            written, at_bonus = written & rows.unsqueeze(1), at_bonus & rows.unsqueeze(1)
        padded = torch.nn.functional.pad(tokens.to(output.dtype), (0, 1))
        output.copy_(torch.where(written, padded, output))
        output.copy_(torch.where(at_bonus, bonus.to(output.dtype), output))


def greedy(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: torch.Tensor | None,
    synthetic_conditional_rates: torch.Tensor | None,
    SYNTHETIC_MODE: bool,
) -> None:
    """The target's own tokens of the greedy requests, up to the first that was not drafted.

    Args:
        output_token_ids: [batch_size, max_spec_len + 1] int32, in place.
        cu_num_draft_tokens: [batch_size] cumulative number of drafts.
        draft_token_ids: [num_tokens].
        target_argmax: [num_tokens].
        bonus_token_ids: [batch_size, 1].
        is_greedy: [batch_size] bool; None: all are.
        max_spec_len: most drafts of a request.
        uniform_probs: [num_tokens] float64, for the synthetic mode alone.
        synthetic_conditional_rates: [max_spec_len] rates of acceptance that vLLM's synthetic mode
            asks for, with which speed is measured.
        SYNTHETIC_MODE: whether they decide.
    """
    places = _Places.of(cu_num_draft_tokens, max_spec_len, draft_token_ids.shape[0])
    drafts, tokens = draft_token_ids[places.index].long(), target_argmax[places.index].long()
    accepted = drafts == tokens
    if SYNTHETIC_MODE and uniform_probs is not None and synthetic_conditional_rates is not None:
        accepted = _synthetic(places, drafts, uniform_probs, synthetic_conditional_rates)
        tokens = torch.where(accepted, drafts, tokens)
    places.write(output_token_ids, tokens, accepted, bonus_token_ids, is_greedy)


def random(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: torch.Tensor | None,
    NO_DRAFT_PROBS: bool,
    SYNTHETIC_MODE: bool,
) -> None:
    """Drafts of the other requests while `target / draft >= uniform`, then a recovered token.

    Source of the rule: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1. A draft below 0 is
    padding and rejected; so is one to which its own drafter gives no probability.

    Args:
        output_token_ids: [batch_size, max_spec_len + 1] int32, in place.
        cu_num_draft_tokens: [batch_size].
        draft_token_ids: [num_tokens].
        draft_probs: [num_tokens, vocab_size]; None: the drafter is sure of its tokens.
        target_probs: [num_tokens, vocab_size] float32.
        bonus_token_ids: [batch_size, 1].
        recovered_token_ids: [num_tokens], what takes the place of a rejected draft.
        uniform_probs: [num_tokens] float64.
        is_greedy: [batch_size] bool.
        max_spec_len: most drafts of a request.
        vocab_size: tokens of the vocabulary.
        synthetic_conditional_rates: as for `greedy`.
        NO_DRAFT_PROBS: whether `draft_probs` is None.
        SYNTHETIC_MODE: as for `greedy`.
    """
    places = _Places.of(cu_num_draft_tokens, max_spec_len, draft_token_ids.shape[0])
    drafts = draft_token_ids[places.index].long()
    if SYNTHETIC_MODE and synthetic_conditional_rates is not None:
        accepted = _synthetic(places, drafts, uniform_probs, synthetic_conditional_rates)
    else:
        column = draft_token_ids.long().clamp(min=0).unsqueeze(1)
        wanted = target_probs.gather(1, column).squeeze(1)
        drafted = torch.ones_like(wanted)
        if draft_probs is not None:
            drafted = draft_probs.gather(1, column).squeeze(1)
        passed = (drafted > 0) & (wanted / drafted >= uniform_probs) & (draft_token_ids >= 0)
        accepted = passed[places.index]
    tokens = torch.where(accepted, drafts, recovered_token_ids[places.index].long())
    places.write(output_token_ids, tokens, accepted, bonus_token_ids, ~is_greedy)


def recovered(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    NO_DRAFT_PROBS: bool,
    USE_FP64_GUMBEL: bool,
) -> None:
    """A token for each place, drawn from what the target has and the draft lacks.

    Args:
        output_token_ids: [num_tokens], in place.
        cu_num_draft_tokens: [batch_size].
        draft_token_ids: [num_tokens]; without `draft_probs` the draft itself is left out.
        draft_probs: [num_tokens, vocab_size] or None.
        target_probs: [num_tokens, vocab_size].
        inv_q: [batch_size, vocab_size], reciprocals of exponentially distributed noise: the
            largest product is a draw from the normalised difference.
        vocab_size: tokens of the vocabulary.
        BLOCK_SIZE: width of the Triton kernel's tile.
        NO_DRAFT_PROBS: whether `draft_probs` is None.
        USE_FP64_GUMBEL: whether the noise is float64; the product is what its dtype says.
    """
    if draft_probs is None:
        column = draft_token_ids.long().unsqueeze(1)
        own = column == torch.arange(vocab_size, device=column.device)
        left = target_probs.masked_fill(own, 0.0)
    else:
        left = (target_probs - draft_probs).clamp(min=0.0)
    tokens = torch.arange(draft_token_ids.shape[0], device=inv_q.device)
    rows = torch.searchsorted(cu_num_draft_tokens.long(), tokens, right=True)
    output_token_ids.copy_((left * inv_q[rows]).argmax(1))


def _synthetic(
    places: _Places, drafts: torch.Tensor, uniform: torch.Tensor, rates: torch.Tensor
) -> torch.Tensor:
    """Acceptance by the rates of each place that a measurement asks for."""
    width = places.index.shape[1]
    return (uniform[places.index] < rates[:width].unsqueeze(0)) & (drafts >= 0)


KERNELS: Mapping[str, LaunchableFunction] = {
    "_rejection_greedy_sample": LaunchableFunction(greedy),
    "_rejection_random_sample": LaunchableFunction(random),
    "_sample_recovered_tokens": LaunchableFunction(recovered),
    "_expand": LaunchableFunction(expand),
}
"""Dispatcher of vLLM's rejection sampler -> what computes it."""


def apply() -> bool:
    """Put them behind the dispatchers; always needed."""
    from vllm.v1.sample import rejection_sampler

    for name, kernel in KERNELS.items():
        install_kernel(getattr(rejection_sampler, name), kernel)
    return True

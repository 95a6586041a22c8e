"""Groups of a batch's requests: decode, verification of drafts, prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from .errors import AttentionBatchError


@attrs.frozen
class RequestGroup:
    """Some requests of a batch, in batch order.

    Attributes:
        rows: Row of each request in the batch.
        token_starts: First token row of each request in the batch.
        query_lens: Tokens of each request.
    """

    rows: tuple[int, ...]
    token_starts: tuple[int, ...]
    query_lens: tuple[int, ...]

    @classmethod
    def from_starts(cls, starts: Sequence[int], rows: Iterable[int]) -> RequestGroup:
        """Group the given rows of a batch with these query starts (``[num_rows + 1]``)."""
        chosen = tuple(rows)
        return cls(
            rows=chosen,
            token_starts=tuple(starts[row] for row in chosen),
            query_lens=tuple(starts[row + 1] - starts[row] for row in chosen),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests of the group."""
        return sum(self.query_lens)

    @property
    def max_query_len(self) -> int:
        """Longest query of the group, 0 for an empty group."""
        return max(self.query_lens, default=0)

    @property
    def token_slice(self) -> slice | None:
        """The token rows of the group as one slice, or None when they are not contiguous."""
        filled = [
            (start, length)
            for start, length in zip(self.token_starts, self.query_lens, strict=True)
            if length
        ]
        first = position = filled[0][0] if filled else 0
        for start, length in filled:
            if start != position:
                return None
            position += length
        return slice(first, position)

    def token_indices(self) -> torch.Tensor:
        """``[num_tokens]`` int64 in host memory: token rows of the group, request by request."""
        lens = torch.tensor(self.query_lens, dtype=torch.int64)
        starts = torch.tensor(self.token_starts, dtype=torch.int64)
        shift = starts - (lens.cumsum(0) - lens)  # from the token's rank in the group to its row
        return torch.arange(self.num_tokens) + torch.repeat_interleave(shift, lens)


@attrs.frozen
class BatchSplit:
    """The real requests of a batch by what they do in this step.

    Requests without tokens in this step, and padding rows, are in no group.

    Attributes:
        decode: One new token.
        spec_decode: Verification of drafts: the last token and 1 to k drafts.
        prefill: Tokens that were known before: prompts, chunks of prompts, recomputation after
            preemption.
    """

    decode: RequestGroup
    spec_decode: RequestGroup
    prefill: RequestGroup


def prefill_flags(
    num_computed: torch.Tensor, num_prompt: torch.Tensor, recomputing: torch.Tensor | None = None
) -> torch.Tensor:
    """Which requests still compute tokens that were known before this step.

    Args:
        num_computed: ``[num_reqs]`` tokens whose keys are already in the cache.
        num_prompt: ``[num_reqs]`` tokens of each prompt.
        recomputing: ``[num_reqs]`` bool, requests that compute generated tokens once more after
            preemption; their cache may already hold the whole prompt.

    Returns:
        ``[num_reqs]`` bool, for :attr:`AttentionBatch.is_prefilling`.
    """
    flags = num_computed < num_prompt
    return flags if recomputing is None else flags | recomputing


def split_rows(
    starts: Sequence[int], num_reqs: int, is_prefilling: Sequence[bool] | None, num_spec_tokens: int
) -> BatchSplit:
    """Sort rows by kind; :meth:`AttentionBatch.split` states the rule.

    Args:
        starts: ``[num_rows + 1]`` query starts.
        num_reqs: Real rows.
        is_prefilling: One flag per row, or None where every row has one token at most.
        num_spec_tokens: Drafts per request, k.

    Raises:
        AttentionBatchError: A flag is needed and absent, or k is negative.
    """
    if num_spec_tokens < 0:
        raise AttentionBatchError("num_spec_tokens", num_spec_tokens, "at least 0")
    lens = [starts[row + 1] - starts[row] for row in range(num_reqs)]
    flags = _single_tokens(lens) if is_prefilling is None else is_prefilling
    groups: dict[str, list[int]] = {"decode": [], "spec_decode": [], "prefill": []}
    for row, length in enumerate(lens):
        if length:
            groups[_kind(length, flags[row], num_spec_tokens)].append(row)
    return BatchSplit(
        **{kind: RequestGroup.from_starts(starts, rows) for kind, rows in groups.items()}
    )


def _kind(length: int, prefilling: bool, num_spec_tokens: int) -> str:
    if prefilling or length > num_spec_tokens + 1:
        return "prefill"
    return "decode" if length == 1 else "spec_decode"


def _single_tokens(lens: Sequence[int]) -> Sequence[bool]:
    """No row is a prefill; only right, and only allowed, while no row has several tokens."""
    for row, length in enumerate(lens):
        if length > 1:
            raise AttentionBatchError(
                "is_prefilling",
                f"None, while row {row} has {length} query tokens",
                "one bool per row; the number of tokens does not tell a prompt from drafts",
            )
    return [False] * len(lens)

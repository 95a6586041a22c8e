"""The tokens of a step whose requests have lengths that only the device knows."""

from __future__ import annotations

from typing import Any, Self

import attrs
import torch

from .batch import AttentionBatch
from .split import RequestGroup
from .starts import repaired_on_host
from .transfer import copy_to_device

MOST_VERIFIED_TOKENS = 16
"""Tokens of a request up to which it is decoding or verifying (vllm-ascend's limit on the tokens
that are verified at once). Attending token by token would cost a prompt more than reading lengths
costs."""


@attrs.frozen(eq=False, kw_only=True)
class StepTokens:
    """Some tokens of a step, and their way into one operator call and back.

    Attributes:
        num_tokens: Query tokens of the call.
        token_slice: Their rows in the step, when they are contiguous.
        token_indices: ``[num_tokens]`` int64 on the device, their rows when they are not.
    """

    num_tokens: int
    token_slice: slice | None
    token_indices: torch.Tensor | None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of ``tensor`` (``[num_tokens of the step, ...]``) that this call takes."""
        if self.token_indices is None:
            rows = tensor if tensor.shape[0] == self.num_tokens else tensor[self.token_slice]
            return rows.contiguous()
        return tensor.index_select(0, self.token_indices)

    def scatter(self, result: torch.Tensor, output: torch.Tensor) -> None:
        """Write the call's ``[num_tokens, ...]`` result into its rows of ``output``."""
        if self.token_indices is None:
            rows = output if output.shape[0] == self.num_tokens else output[self.token_slice]
            rows.copy_(result)
        else:
            output.index_copy_(0, self.token_indices, result)

    def places(self) -> dict[str, Any]:
        """The fields of this class, for a record of the same tokens."""
        return {name: getattr(self, name) for name in attrs.fields_dict(StepTokens)}


@attrs.frozen(eq=False, kw_only=True)
class OpenTokens(StepTokens):
    """The tokens of requests on whose lengths the host has bounds only.

    Attributes:
        bounds: ``[num_reqs]`` keys of each request at most, at least 1; exact in ``known_rows``.
        known_rows: Requests whose bound is exact: they compute tokens that were known before.
        query_lens: ``[num_reqs]`` query tokens of each request, 0 in ``known_rows``; None where the
            host does not have the query starts.
    """

    bounds: tuple[int, ...]
    known_rows: tuple[int, ...] = ()
    query_lens: tuple[int, ...] | None = None

    @classmethod
    def of(cls, batch: AttentionBatch, room: int) -> Self | None:
        """The open tokens of a batch. Reads no device tensor.

        Args:
            batch: The step.
            room: Keys that a row of the block table addresses; no bound is larger.

        Returns:
            None where the host knows the lengths, or has no bounds, or where a request is open
            that has more than 16 tokens.
        """
        bounds = batch.seq_lens_cpu_upper_bound
        if bounds is None or batch.seq_lens_cpu is not None or not batch.num_tokens:
            return None
        held = tuple(bounds[: batch.num_reqs].clamp(1, max(room, 1)).tolist())
        if batch.query_start_loc_cpu is None:
            if batch.max_query_len > MOST_VERIFIED_TOKENS:
                return None
            everything = slice(0, batch.num_tokens)
            return cls(
                num_tokens=batch.num_tokens, token_slice=everything, token_indices=None, bounds=held
            )
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1]
        return cls._split(batch, repaired_on_host(starts, batch.num_tokens), held)

    @classmethod
    def _split(
        cls, batch: AttentionBatch, starts: list[int], bounds: tuple[int, ...]
    ) -> Self | None:
        rows = range(batch.num_reqs)
        flags = [False] * len(rows) if batch.is_prefilling is None else batch.is_prefilling.tolist()
        group = RequestGroup.from_starts(starts, [row for row in rows if not flags[row]])
        if group.max_query_len > MOST_VERIFIED_TOKENS:
            return None
        tokens = group.token_slice
        indices = (
            None if tokens is not None else copy_to_device(group.token_indices(), batch.device)
        )
        lens = dict(zip(group.rows, group.query_lens, strict=True))
        return cls(
            num_tokens=group.num_tokens,
            token_slice=tokens,
            token_indices=indices,
            bounds=bounds,
            known_rows=tuple(row for row in rows if flags[row]),
            query_lens=tuple(lens.get(row, 0) for row in rows),
        )

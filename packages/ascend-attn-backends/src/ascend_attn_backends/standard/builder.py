"""Builds the standard backend's metadata, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import Any

import attrs
import torch

from ascend_attn_ops import CallSeries, StepCalls

from ..batch import AttentionBatch
from ..errors import AttentionBatchError
from ..kv_layout import num_blocks_for
from ..masks import SHARED_MASKS, AttentionMaskBuilder
from ..open_tokens import OpenTokens
from ..split import RequestGroup
from ..starts import repaired_on_host
from ..transfer import copy_to_device
from .metadata import AscendMetadata, AttentionLaunch
from .token_step import token_step


@attrs.frozen
class AscendAttentionMetadataBuilder:
    """A function from batch to metadata; everything that no layer changes is computed here.

    Metadata depends on nothing but the batch. What a host worked out for the operator calls of one
    step is kept for the next, which mostly differs in its lengths alone.

    The attention operator takes its lengths as host integers. They come from the batch's host
    copies; without these, each of the two length tensors is read from the device once per step,
    unless the batch has bounds: see :meth:`build`.

    Attributes:
        block_size: Tokens per cache block.
        masks: Where the mask template comes from; by default one template per device and process.
    """

    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    masks: AttentionMaskBuilder = attrs.field(default=SHARED_MASKS, kw_only=True)
    _series: CallSeries = attrs.field(factory=CallSeries, init=False, eq=False, repr=False)

    def build(self, batch: AttentionBatch) -> AscendMetadata:
        """Metadata of one step.

        Nothing in it aliases the batch: block table and slots are copied, lengths become tuples.
        Query starts pass through :func:`repair_starts` and negative key counts become 0, so rows
        that a runner left dirty compute nothing.

        Where the batch has bounds instead of host lengths (``seq_lens_cpu_upper_bound``) nothing is
        read: unknown lengths stay on the device, see :class:`TokenStep`. The keys up to the bound
        are then read once per token, which suits decode and verification. Where ``is_prefilling``,
        the bound is the length. A step in which another request has more than 16 tokens, or whose
        masks would be larger than 64 MiB, reads its lengths.

        Raises:
            AttentionBatchError: The block table has fewer columns than a request has blocks.
        """
        opened = OpenTokens.of(batch, self._room(batch))
        if opened is not None:
            step = token_step(batch, self.block_size, opened) if opened.num_tokens else None
            if step is not None or not opened.num_tokens:
                return AscendMetadata(**self._open_fields(batch, opened), token_step=step)
        return AscendMetadata(**self._fields(batch, host_key_counts(batch)))

    def _room(self, batch: AttentionBatch) -> int:
        """Keys that a row of the block table addresses."""
        return batch.block_table.shape[1] * self.block_size

    def _open_fields(self, batch: AttentionBatch, opened: OpenTokens) -> dict[str, Any]:
        """The fields of an :class:`AscendMetadata` with calls over the known rows only."""
        if opened.query_lens is not None:
            return self._fields(batch, list(opened.bounds), opened.known_rows)
        batch.validate_in_debug()
        return {
            "num_reqs": batch.num_reqs,
            "num_tokens": batch.num_tokens,
            "block_size": self.block_size,
            "max_query_len": batch.max_query_len,
            "max_seq_len": max(opened.bounds),
            "launches": (),
            "slot_mapping": batch.slot_mapping.clone(),
            "causal_template": self.masks.template(batch.device),
        }

    def _fields(
        self, batch: AttentionBatch, keys: list[int], rows: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """The fields of an :class:`AscendMetadata` when each request attends over ``keys``.

        With ``rows`` the calls are over these requests only.
        """
        batch.validate_in_debug()
        starts = covered_starts(batch)
        table = self._block_table(batch, keys)
        return {
            "num_reqs": batch.num_reqs,
            "num_tokens": starts[-1],
            "block_size": self.block_size,
            "max_query_len": max(map(sub, starts[1:], starts), default=0),
            "max_seq_len": max(keys, default=0),
            "launches": _launches(batch, starts, keys, table, rows, self._series),
            "slot_mapping": batch.slot_mapping.clone(),
            "causal_template": self.masks.template(batch.device),
        }

    def _block_table(self, batch: AttentionBatch, keys: Sequence[int]) -> torch.Tensor:
        """``[num_reqs, needed]`` copy of the columns that this step can read."""
        needed = num_blocks_for(max(keys, default=0), self.block_size)
        width = batch.block_table.shape[1]
        if needed > width:
            raise AttentionBatchError(
                "block_table",
                f"{width} columns",
                f"at least {needed}, for {max(keys)} keys in blocks of {self.block_size}",
            )
        columns = max(needed, min(width, 1))
        return batch.block_table[: batch.num_reqs, :columns].clone(
            memory_format=torch.contiguous_format
        )


def host_key_counts(batch: AttentionBatch) -> list[int]:
    """``[num_reqs]`` keys of each real request, at least 0, as host integers."""
    counts: list[int] = batch.host_seq_lens()[: batch.num_reqs].tolist()
    return counts if min(counts, default=0) >= 0 else [max(count, 0) for count in counts]


def covered_starts(batch: AttentionBatch) -> list[int]:
    """``[num_reqs + 1]`` repaired query starts of the real requests, as host integers."""
    starts = batch.host_query_starts()[: batch.num_reqs + 1]
    return repaired_on_host(starts, batch.num_tokens)


def _launches(
    batch: AttentionBatch,
    starts: list[int],
    keys: list[int],
    table: torch.Tensor,
    rows: Sequence[int] | None,
    series: CallSeries,
) -> tuple[AttentionLaunch, ...]:
    """One call, or two when causality differs between requests; none without tokens."""
    if starts[-1] == 0 or rows == ():
        return ()
    causal = batch.host_causal()[: batch.num_reqs]
    if len(set(causal)) == 1 and rows is None:
        return (_whole_step(causal[0], starts, keys, table, StepCalls(series)),)
    rows = range(batch.num_reqs) if rows is None else rows
    groups = {
        kind: RequestGroup.from_starts(starts, [row for row in rows if causal[row] is kind])
        for kind in (True, False)
    }
    return tuple(
        _part_of_step(kind, group, keys, table)
        for kind, group in groups.items()
        if group.num_tokens
    )


def _whole_step(
    causal: bool, starts: list[int], keys: list[int], table: torch.Tensor, calls: StepCalls
) -> AttentionLaunch:
    return AttentionLaunch(
        calls=calls,
        causal=causal,
        num_tokens=starts[-1],
        token_slice=slice(0, starts[-1]),
        token_indices=None,
        query_lens_cumulative=tuple(starts[1:]),
        seq_lens=tuple(keys),
        block_table=table,
    )


def _part_of_step(
    causal: bool, group: RequestGroup, keys: list[int], table: torch.Tensor
) -> AttentionLaunch:
    tokens, device = group.token_slice, table.device
    rows = copy_to_device(torch.tensor(group.rows, dtype=torch.int64), device)
    return AttentionLaunch(
        causal=causal,
        num_tokens=group.num_tokens,
        token_slice=tokens,
        query_lens_cumulative=tuple(accumulate(group.query_lens)),
        seq_lens=tuple(keys[row] for row in group.rows),
        block_table=table.index_select(0, rows),
        token_indices=copy_to_device(group.token_indices(), device) if tokens is None else None,
    )

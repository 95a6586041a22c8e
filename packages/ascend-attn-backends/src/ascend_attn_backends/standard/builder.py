"""Builds the standard backend's metadata, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import AttentionBatchError
from ..kv_layout import num_blocks_for
from ..masks import SHARED_MASKS, AttentionMaskBuilder
from ..split import RequestGroup
from ..starts import repair_starts
from ..transfer import copy_to_device
from .metadata import AscendMetadata, AttentionLaunch


@attrs.frozen
class AscendAttentionMetadataBuilder:
    """A pure function from batch to metadata; everything that no layer changes is computed here.

    The attention operator takes its lengths as host integers. They come from the batch's host
    copies; without these, each of the two length tensors is read from the device once per step.

    Attributes:
        block_size: Tokens per cache block.
        masks: Where the mask template comes from; by default one template per device and process.
    """

    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    masks: AttentionMaskBuilder = attrs.field(default=SHARED_MASKS, kw_only=True)

    def build(self, batch: AttentionBatch) -> AscendMetadata:
        """Metadata of one step.

        Nothing in it aliases the batch: block table and slots are copied, lengths become tuples.
        Query starts pass through :func:`repair_starts` and negative key counts become 0, so rows
        that a runner left dirty compute nothing.

        Raises:
            AttentionBatchError: The block table has fewer columns than a request has blocks.
        """
        starts = _covered_starts(batch)
        keys = batch.host_seq_lens()[: batch.num_reqs].clamp(min=0).tolist()
        table = self._block_table(batch, keys)
        groups = _groups(batch, starts)
        return AscendMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=starts[-1],
            block_size=self.block_size,
            max_query_len=max((group.max_query_len for _, group in groups), default=0),
            max_seq_len=max(keys, default=0),
            launches=tuple(_launch(group, causal, keys, table) for causal, group in groups),
            slot_mapping=batch.slot_mapping.clone(),
            causal_template=self.masks.template(batch.device),
        )

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


def _covered_starts(batch: AttentionBatch) -> list[int]:
    starts = batch.host_query_starts()[: batch.num_reqs + 1]
    repaired: list[int] = repair_starts(starts, batch.num_tokens).tolist()
    return repaired


def _groups(batch: AttentionBatch, starts: Sequence[int]) -> list[tuple[bool, RequestGroup]]:
    """The requests by causality, without groups that have no tokens."""
    causal = batch.host_causal()
    groups = []
    for kind in (True, False):
        rows = [row for row in range(batch.num_reqs) if causal[row] is kind]
        group = RequestGroup.from_starts(starts, rows)
        if group.num_tokens:
            groups.append((kind, group))
    return groups


def _launch(
    group: RequestGroup, causal: bool, keys: Sequence[int], table: torch.Tensor
) -> AttentionLaunch:
    tokens = group.token_slice
    indices = copy_to_device(group.token_indices(), table.device) if tokens is None else None
    return AttentionLaunch(
        causal=causal,
        num_tokens=group.num_tokens,
        token_slice=tokens,
        token_indices=indices,
        query_lens_cumulative=tuple(accumulate(group.query_lens)),
        seq_lens=tuple(keys[row] for row in group.rows),
        block_table=_rows_of(table, group.rows),
    )


def _rows_of(table: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == table.shape[0]:
        return table
    chosen = copy_to_device(torch.tensor(rows, dtype=torch.int64), table.device)
    return table.index_select(0, chosen)

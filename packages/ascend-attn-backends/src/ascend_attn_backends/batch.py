"""The immutable description of one step's requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ascend_attn_ops.context import sanitizing

from . import _batch_checks
from .kv_layout import PAD_SLOT, num_blocks_for, slots_for_positions
from .split import BatchSplit, split_rows
from .transfer import copy_to_device


@attrs.frozen(eq=False, kw_only=True)
class AttentionBatch:
    """What attention needs to know about the requests of one step.

    Rows are ``num_rows = num_reqs + num_padded_reqs`` requests, real ones first; token rows are
    ``num_token_rows = num_tokens + num_padded_tokens``, real ones first. Shapes and dtypes are
    checked when the record is made (no value is read); :meth:`validate` checks values.

    The tensors are the caller's and are not copied here. The builders copy what their metadata
    keeps, so a caller may refill its buffers once metadata is built.

    Attributes:
        query_start_loc: ``[num_rows + 1]`` int32. Row i has the tokens ``query_start_loc[i]`` up
            to ``query_start_loc[i + 1]``. Padding rows repeat the last start or own pad tokens.
        seq_lens: ``[num_rows]`` int32, keys of each request including this step's tokens; 0 in
            padding rows.
        block_table: ``[num_rows, max_blocks]`` int32, block ids of each request in order.
        slot_mapping: ``[num_token_rows]`` int64, cache slot of each token; a negative slot is
            never written. Padding tokens have slot -1.
        num_reqs: Real requests.
        num_tokens: Real tokens; tokens at their end that no request owns have negative slots.
        max_query_len: Longest query, or a bound above it.
        max_seq_len: Longest ``seq_lens`` entry, or a bound above it.
        causal: One value for all requests, or ``[num_rows]`` bool.
        query_start_loc_cpu: Host copy of ``query_start_loc``; exact. With it and ``seq_lens_cpu``
            (and ``causal_cpu`` for a per-request ``causal``) no builder reads from the device.
        seq_lens_cpu: Host copy of ``seq_lens``; exact, an upper bound is not enough.
        seq_lens_cpu_upper_bound: ``[num_rows]`` int32 in host memory, not less than ``seq_lens``,
            and equal to it where ``is_prefilling``: what a scheduler knows while the acceptance of
            drafts is on the way. Where ``seq_lens_cpu`` is None, builders that would read
            ``seq_lens`` leave it on the device, unless another request has more than 16 tokens.
        causal_cpu: Host copy of a per-request ``causal``.
        is_prefilling: ``[num_rows]`` bool in host memory: the request still computes tokens that
            were known before this step. See :func:`ascend_attn_backends.prefill_flags`.
        num_padded_reqs: Padding rows after the real ones.
        num_padded_tokens: Padding token rows after the real ones.
        has_shard_lengths: ``seq_lens`` counts the keys of one rank of several, so a request may
            have fewer than this step's tokens; see :func:`ascend_attn_backends.per_token_batch`.

    Raises:
        AttentionBatchError: A shape, dtype or count does not fit; names the field.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool | torch.Tensor = True
    query_start_loc_cpu: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    causal_cpu: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    num_padded_reqs: int = 0
    num_padded_tokens: int = 0
    has_shard_lengths: bool = False

    def __attrs_post_init__(self) -> None:
        _batch_checks.check_structure(self)

    @property
    def num_rows(self) -> int:
        """Real and padding requests."""
        return self.num_reqs + self.num_padded_reqs

    @property
    def num_token_rows(self) -> int:
        """Real and padding tokens."""
        return self.num_tokens + self.num_padded_tokens

    @property
    def device(self) -> torch.device:
        """Device of the batch's tensors."""
        return self.block_table.device

    def host_query_starts(self) -> torch.Tensor:
        """``[num_rows + 1]`` in host memory; reads the device only without a host copy."""
        given = self.query_start_loc_cpu
        return self.query_start_loc.cpu() if given is None else given

    def host_seq_lens(self) -> torch.Tensor:
        """``[num_rows]`` in host memory; reads the device only without a host copy."""
        return self.seq_lens.cpu() if self.seq_lens_cpu is None else self.seq_lens_cpu

    def host_causal(self) -> list[bool]:
        """One value per row; reads the device only for a per-request tensor without a copy."""
        if isinstance(self.causal, bool):
            return [self.causal] * self.num_rows
        given = self.causal if self.causal_cpu is None else self.causal_cpu
        values: list[bool] = given.tolist()
        return values

    def validate(self, block_size: int | None = None, num_blocks: int | None = None) -> None:
        """Check the values of all fields. Reads device tensors: for tests and debugging.

        Args:
            block_size: Tokens per block; with it the width of the block table is checked.
            num_blocks: Blocks in the pool; with ``block_size`` ids and slots are checked too.

        Raises:
            AttentionBatchError: The first broken invariant, with field, element, found, allowed.
        """
        _batch_checks.check_values(self, block_size, num_blocks)

    def validate_in_debug(self, block_size: int | None = None) -> None:
        """:meth:`validate`, but only while debugging; the builders call it with every batch.

        Debugging is ``ASCEND_ATTN_SANITIZE=1``, the context :func:`ascend_attn_ops.sanitize`, or
        Python's development mode (``python -X dev``). It finds what builders otherwise repair in
        silence, such as stale rows. It reads device tensors, so not while a graph is captured;
        tensors without values (device ``meta``) are let through.

        Args:
            block_size: Tokens per block; with it the width of the block table is checked.

        Raises:
            AttentionBatchError: The first broken invariant, with field, element, found, allowed.
        """
        if (sys.flags.dev_mode or sanitizing()) and self.device.type != "meta":
            self.validate(block_size)

    def split(self, num_spec_tokens: int = 0) -> BatchSplit:
        """Sort the real requests into decode, verification of drafts and prefill.

        The number of query tokens alone cannot tell: a prompt of k + 1 tokens and the last chunk of
        a long prompt look exactly like the verification of k drafts. :attr:`is_prefilling` decides
        first; of the other requests, one token is a decode, up to ``num_spec_tokens + 1`` tokens
        are a verification, and more can only be a recomputation, hence prefill.

        Args:
            num_spec_tokens: Drafts per request, k.

        Raises:
            AttentionBatchError: ``is_prefilling`` is None although a request has several tokens,
                or ``num_spec_tokens`` is negative.
        """
        flags = None if self.is_prefilling is None else self.is_prefilling.tolist()
        starts = self.host_query_starts().tolist()
        return split_rows(starts, self.num_reqs, flags, num_spec_tokens)

    def padded(self, num_rows: int, num_token_rows: int) -> AttentionBatch:
        """This batch with padding up to the given counts; every field grows together.

        Padding rows have no tokens, length 0 and cleared block rows; padding tokens have slot -1.
        The new batch shares no memory with this one.

        Raises:
            AttentionBatchError: A count is smaller than what the batch already has.
        """
        return _padded(self, num_rows, num_token_rows)

    @classmethod
    def dummy(
        cls, num_reqs: int, query_len: int, max_blocks: int, device: torch.device | str = "cpu"
    ) -> AttentionBatch:
        """A batch for warm-up and idle runs: computes with ``query_len`` tokens, writes nothing.

        Every slot is -1 and every block row is cleared, whatever ran before.

        Args:
            num_reqs: Requests.
            query_len: Tokens, and keys, of each request.
            max_blocks: Columns of the block table.
            device: Where the tensors live.
        """
        starts = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
        lens = torch.full((num_reqs,), query_len, dtype=torch.int32)
        return cls(
            query_start_loc=copy_to_device(starts, device),
            seq_lens=copy_to_device(lens, device),
            block_table=torch.zeros((num_reqs, max_blocks), dtype=torch.int32, device=device),
            slot_mapping=torch.full(
                (num_reqs * query_len,), PAD_SLOT, dtype=torch.int64, device=device
            ),
            num_reqs=num_reqs,
            num_tokens=num_reqs * query_len,
            max_query_len=query_len,
            max_seq_len=query_len,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
        )

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_size: int,
        *,
        block_table: torch.Tensor | None = None,
        causal: bool | Sequence[bool] = True,
        is_prefilling: Sequence[bool] | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """A valid batch from what a scheduler knows.

        Args:
            query_lens: Tokens of each request in this step.
            seq_lens: Keys of each request including these tokens.
            block_size: Tokens per block.
            block_table: ``[num_reqs, max_blocks]`` int32 in host memory; None gives each request
                the next free blocks, from 0.
            causal: One value, or one per request.
            is_prefilling: One flag per request; see :attr:`is_prefilling`.
            device: Where the tensors live. Host copies are always kept.

        Raises:
            AttentionBatchError: A length is negative, more tokens than keys, counts differ, or the
                block table is too narrow.
        """
        _batch_checks.check_lengths(query_lens, seq_lens)
        if block_table is None:
            block_table = consecutive_blocks(seq_lens, block_size)
        host = _host_fields(query_lens, seq_lens, block_table, block_size)
        tensors: dict[str, Any] = {
            name: copy_to_device(value, device) for name, value in host.items()
        }
        if isinstance(causal, bool):
            tensors["causal"] = causal
        else:
            tensors["causal_cpu"] = torch.tensor(list(causal), dtype=torch.bool)
            tensors["causal"] = copy_to_device(tensors["causal_cpu"], device)
        if is_prefilling is not None:
            tensors["is_prefilling"] = torch.tensor(list(is_prefilling), dtype=torch.bool)
        return cls(
            **tensors,
            num_reqs=len(query_lens),
            num_tokens=sum(query_lens),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            query_start_loc_cpu=host["query_start_loc"],
            seq_lens_cpu=host["seq_lens"],
        )


def consecutive_blocks(seq_lens: Sequence[int], block_size: int) -> torch.Tensor:
    """``[num_reqs, max_blocks]`` int32: request after request takes the next blocks, from 0."""
    counts = [num_blocks_for(length, block_size) for length in seq_lens]
    table = torch.zeros((len(counts), max([1, *counts])), dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return table


def _host_fields(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    block_size: int,
) -> dict[str, torch.Tensor]:
    lens = torch.tensor(list(query_lens), dtype=torch.int64)
    keys = torch.tensor(list(seq_lens), dtype=torch.int64)
    starts = torch.zeros(len(lens) + 1, dtype=torch.int64)
    torch.cumsum(lens, 0, out=starts[1:])
    rows = torch.repeat_interleave(torch.arange(len(lens)), lens)
    positions = torch.arange(len(rows)) - starts[rows] + (keys - lens)[rows]
    _batch_checks.check_width(block_table, keys, block_size)
    return {
        "query_start_loc": starts.int(),
        "seq_lens": keys.int(),
        "block_table": block_table,
        "slot_mapping": slots_for_positions(block_table, rows, positions, block_size),
    }


_ROW_PADDING: dict[str, int | bool | None] = {
    "query_start_loc": None,
    "query_start_loc_cpu": None,
    "seq_lens": 0,
    "seq_lens_cpu": 0,
    "seq_lens_cpu_upper_bound": 0,
    "block_table": 0,
    "causal": True,
    "causal_cpu": True,
    "is_prefilling": False,
}
"""Value of a padding row in each per-request field; None repeats the last entry."""


def _padded(batch: AttentionBatch, num_rows: int, num_token_rows: int) -> AttentionBatch:
    _batch_checks.check_padding(batch, num_rows, num_token_rows)
    rows, tokens = num_rows - batch.num_rows, num_token_rows - batch.num_token_rows
    changes: dict[str, Any] = {
        name: _grown(getattr(batch, name), rows, fill) for name, fill in _ROW_PADDING.items()
    }
    return attrs.evolve(
        batch,
        **changes,
        slot_mapping=_grown(batch.slot_mapping, tokens, PAD_SLOT),
        num_padded_reqs=batch.num_padded_reqs + rows,
        num_padded_tokens=batch.num_padded_tokens + tokens,
    )


def _grown(value: Any, count: int, fill: int | bool | None) -> Any:
    """A longer copy of a tensor; a field without one (None, or one causal value) as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if fill is None:
        tail = value[-1:].expand(count)
    else:
        tail = value.new_full((count, *value.shape[1:]), fill)
    return torch.cat([value, tail])

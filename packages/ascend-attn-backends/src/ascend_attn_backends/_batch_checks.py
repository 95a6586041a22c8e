"""Invariants of :class:`AttentionBatch`; every failure names the field, found and allowed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from .errors import AttentionBatchError
from .kv_layout import num_blocks_for

if TYPE_CHECKING:
    from .batch import AttentionBatch


class _Layout(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    host: bool = False

    def fits(self, value: torch.Tensor) -> bool:
        """Whether a tensor is laid out like this."""
        shape = value.shape
        if shape != self.shape:
            pairs = zip(self.shape, shape, strict=False)
            if len(shape) != len(self.shape) or any(n not in (None, m) for n, m in pairs):
                return False
        return value.dtype == self.dtype and (value.is_cpu or not self.host)


@lru_cache(maxsize=256)
def _layouts(rows: int, tokens: int) -> tuple[tuple[str, _Layout], ...]:
    """Layout of every tensor of a batch of so many rows and token rows."""
    host_rows = _Layout(torch.int32, (rows,), host=True)
    flags = _Layout(torch.bool, (rows,), host=True)
    return (
        ("query_start_loc", _Layout(torch.int32, (rows + 1,))),
        ("seq_lens", _Layout(torch.int32, (rows,))),
        ("block_table", _Layout(torch.int32, (rows, None))),
        ("slot_mapping", _Layout(torch.int64, (tokens,))),
        ("causal", _Layout(torch.bool, (rows,))),
        ("query_start_loc_cpu", _Layout(torch.int32, (rows + 1,), host=True)),
        ("seq_lens_cpu", host_rows),
        ("seq_lens_cpu_upper_bound", host_rows),
        ("causal_cpu", flags),
        ("is_prefilling", flags),
    )


def check_structure(batch: AttentionBatch) -> None:
    """Check counts, shapes and dtypes; reads no tensor value."""
    for name in ("num_reqs", "num_tokens", "max_query_len", "max_seq_len"):
        _at_least_zero(name, getattr(batch, name))
    for name in ("num_padded_reqs", "num_padded_tokens"):
        _at_least_zero(name, getattr(batch, name))
    for name, layout in _layouts(batch.num_rows, batch.num_token_rows):
        value = getattr(batch, name)
        if isinstance(value, torch.Tensor) and not layout.fits(value):
            raise _misfit(name, value, layout)


def _misfit(name: str, value: torch.Tensor, layout: _Layout) -> AttentionBatchError:
    sizes = ["any" if size is None else size for size in layout.shape]
    return AttentionBatchError(
        name,
        f"{value.dtype} {list(value.shape)} on {value.device}",
        f"{layout.dtype} {sizes}{' in host memory' if layout.host else ''}",
    )


def _at_least_zero(name: str, value: int) -> None:
    if value < 0:
        raise AttentionBatchError(name, value, "at least 0")


def check_lengths(query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
    """Check the lengths that a batch is made from."""
    if len(query_lens) != len(seq_lens):
        raise AttentionBatchError("seq_lens", f"{len(seq_lens)} rows", f"{len(query_lens)} rows")
    for row, (tokens, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if tokens < 0:
            raise AttentionBatchError(f"query_lens[{row}]", tokens, "at least 0")
        if keys < tokens:
            raise AttentionBatchError(
                f"seq_lens[{row}]", keys, f"at least the {tokens} query tokens of the row"
            )


def check_width(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> None:
    """Check that every row of the block table has a column for each of its blocks."""
    width = block_table.shape[1]
    for row, keys in enumerate(seq_lens.tolist()):
        needed = num_blocks_for(keys, block_size)
        if needed > width:
            raise AttentionBatchError(
                "block_table",
                f"{width} columns",
                f"at least {needed}, for the {keys} keys of row {row} in blocks of {block_size}",
            )


def check_padding(batch: AttentionBatch, num_rows: int, num_token_rows: int) -> None:
    """Check that padding only grows a batch."""
    if num_rows < batch.num_rows:
        raise AttentionBatchError("num_rows", num_rows, f"at least {batch.num_rows}")
    if num_token_rows < batch.num_token_rows:
        raise AttentionBatchError(
            "num_token_rows", num_token_rows, f"at least {batch.num_token_rows}"
        )


def check_values(batch: AttentionBatch, block_size: int | None, num_blocks: int | None) -> None:
    """Check the values of every field; reads device tensors."""
    starts = batch.query_start_loc.tolist()
    keys = batch.seq_lens.tolist()
    _check_host_copies(batch)
    _check_bounds(batch, keys)
    _check_starts(batch, starts)
    _check_keys(batch, starts, keys)
    _check_slots(batch)
    if block_size is not None:
        check_width(batch.block_table, batch.seq_lens, block_size)
    if block_size is not None and num_blocks is not None:
        _check_pool(batch, keys, block_size, num_blocks)


def _check_host_copies(batch: AttentionBatch) -> None:
    for name in ("query_start_loc", "seq_lens", "causal"):
        host, device = getattr(batch, f"{name}_cpu"), getattr(batch, name)
        if host is None:
            continue
        if not isinstance(device, torch.Tensor):
            raise AttentionBatchError(f"{name}_cpu", "a host copy", f"None, as {name} is a bool")
        wrong = (host != device.cpu()).nonzero()
        if wrong.numel():
            first = int(wrong[0])
            raise AttentionBatchError(
                f"{name}_cpu[{first}]", host[first].item(), f"{device[first].item()} as in {name}"
            )


def _check_bounds(batch: AttentionBatch, keys: list[int]) -> None:
    bounds, flags = batch.seq_lens_cpu_upper_bound, batch.is_prefilling
    for row, bound in enumerate([] if bounds is None else bounds.tolist()):
        exact = flags is not None and bool(flags[row])
        if bound < keys[row] or (exact and bound > keys[row]):
            least = "the" if exact else "at least the"
            why = " of a row that is prefilling" if exact else " of the row"
            raise AttentionBatchError(
                f"seq_lens_cpu_upper_bound[{row}]", bound, f"{least} {keys[row]} keys{why}"
            )


def _check_starts(batch: AttentionBatch, starts: list[int]) -> None:
    if starts[0] != 0:
        raise AttentionBatchError("query_start_loc[0]", starts[0], "0")
    for row in range(batch.num_rows):
        if starts[row + 1] < starts[row]:
            raise AttentionBatchError(
                f"query_start_loc[{row + 1}]",
                starts[row + 1],
                f"at least {starts[row]}, the start before it",
            )
    owned = starts[batch.num_reqs]
    stray = (batch.slot_mapping[owned : batch.num_tokens] >= 0).nonzero()
    if owned > batch.num_tokens or stray.numel():
        allowed = f"{batch.num_tokens}, or less where the tokens after it have negative slots"
        raise AttentionBatchError(f"query_start_loc[{batch.num_reqs}]", owned, allowed)
    if starts[-1] > batch.num_token_rows:
        raise AttentionBatchError(
            f"query_start_loc[{batch.num_rows}]", starts[-1], f"at most {batch.num_token_rows}"
        )


def _check_keys(batch: AttentionBatch, starts: list[int], keys: list[int]) -> None:
    lens = [after - before for before, after in pairwise(starts)]
    for row in range(batch.num_reqs):
        fewest = 0 if batch.has_shard_lengths else lens[row]
        if keys[row] < fewest:
            raise AttentionBatchError(
                f"seq_lens[{row}]", keys[row], f"at least the {fewest} query tokens of the row"
            )
    for row in range(batch.num_reqs, batch.num_rows):
        if keys[row] != 0:
            raise AttentionBatchError(f"seq_lens[{row}]", keys[row], "0 in a padding row")
    for name, values in (("max_query_len", lens[: batch.num_reqs]), ("max_seq_len", keys)):
        largest = max(values, default=0)
        if getattr(batch, name) < largest:
            raise AttentionBatchError(name, getattr(batch, name), f"at least {largest}")


def _check_slots(batch: AttentionBatch) -> None:
    slots = batch.slot_mapping.tolist()
    for token in range(batch.num_tokens, batch.num_token_rows):
        if slots[token] >= 0:
            raise AttentionBatchError(
                f"slot_mapping[{token}]", slots[token], "negative for a padding token"
            )
    seen: dict[int, int] = {}
    for token, slot in enumerate(slots):
        if slot >= 0 and slot in seen:
            raise AttentionBatchError(
                f"slot_mapping[{token}]", slot, f"a slot of its own; token {seen[slot]} has it"
            )
        seen[slot] = token


def _check_pool(batch: AttentionBatch, keys: list[int], block_size: int, num_blocks: int) -> None:
    for row, blocks in enumerate(batch.block_table.tolist()):
        for column, block in enumerate(blocks[: num_blocks_for(keys[row], block_size)]):
            if not 0 <= block < num_blocks:
                raise AttentionBatchError(
                    f"block_table[{row}, {column}]", block, f"0 to {num_blocks - 1}"
                )
    for token, slot in enumerate(batch.slot_mapping.tolist()):
        if slot >= num_blocks * block_size:
            raise AttentionBatchError(
                f"slot_mapping[{token}]", slot, f"at most {num_blocks * block_size - 1}"
            )

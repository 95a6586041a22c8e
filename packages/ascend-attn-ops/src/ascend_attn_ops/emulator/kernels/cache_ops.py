"""Writing keys and values into paged caches and reading them out, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ..abi import NOT_EMULATED, AclnnError
from ..contracts import contract_check
from ..dispatch import kernel


@kernel("aclnnScatterPaKvCache", check=contract_check("scatter_pa_kv_cache"))
def scatter_pa_kv_cache(a: Any) -> None:
    """In place; a negative slot is skipped."""
    if a.key.dim() != 3:
        raise AclnnError(NOT_EMULATED, "key: the compressing scenario (rank 4) is not emulated")
    blocked = a.cache_mode == "PA_NZ"
    for cache, rows in ((a.key_cache, a.key), (a.value_cache, a.value)):
        for slot, row in zip(a.slot_mapping.tolist(), rows, strict=True):
            if slot >= 0:
                cache_token(cache, slot, blocked=blocked).copy_(shaped(row, cache, blocked))


def cache_token(cache: torch.Tensor, slot: int, *, blocked: bool) -> torch.Tensor:
    """View of the elements of a slot: (N, D) of (nb, bs, N, D), or (pieces, L) of an NZ cache."""
    size = cache.shape[2 if blocked else 1]
    block, offset = divmod(slot, size)
    return cache[block, :, offset] if blocked else cache[block, offset]


def shaped(row: torch.Tensor, cache: torch.Tensor, blocked: bool) -> torch.Tensor:
    """A token's (N, D) as the cache stores it; zeros fill the last piece of an NZ cache."""
    if not blocked:
        return row
    pieces, width = cache.shape[1], cache.shape[3]
    filled = row.new_zeros(pieces * width)
    filled[: row.numel()] = row.flatten()
    return filled.view(pieces, width)


@kernel("aclnnGatherPaKvCache", check=contract_check("gather_pa_kv_cache"))
def gather_pa_kv_cache(a: Any) -> None:
    """Rows in the order of the requests; an unknown block reads as zeros."""
    blocked = a.cache_mode == "PA_NZ"
    size = a.key_cache.shape[2 if blocked else 1]
    places = list(_places(a, size))[: len(a.key)]
    for cache, rows in ((a.key_cache, a.key), (a.value_cache, a.value)):
        for row, (block, offset) in enumerate(places):
            target = rows[row]
            if 0 <= block < len(cache):
                token = cache_token(cache, block * size + offset, blocked=blocked)
                target.copy_(token.flatten()[: target.numel()].view(target.shape))
            else:
                target.zero_()


def _places(a: Any, size: int) -> Iterator[tuple[int, int]]:
    """Block and offset of every row to read; -1 for a column beyond the table."""
    lengths = a.seq_lens.tolist()
    if a.is_seq_lens_cumsum:
        lengths = [end - start for start, end in itertools.pairwise(lengths)]
    offsets = [0] * len(lengths) if a.seq_offset is None else a.seq_offset.tolist()
    for length, offset, table in zip(lengths, offsets, a.block_tables.tolist(), strict=True):
        for position in range(length):
            column = offset // size + position // size
            yield table[column] if 0 <= column < len(table) else -1, position % size

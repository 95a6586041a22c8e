"""The definition, row by row."""

from __future__ import annotations

from .arguments import GatherPaKvCacheArguments as Args


def run_reference(a: Args) -> None:
    """Fill ``key`` and ``value``; see the argument record."""
    row = 0
    for request, length in enumerate(a.lengths().tolist()):
        first = int(a.first_columns()[request])
        for token in range(min(length, a.key.shape[0] - row)):
            block = _block(a, request, first + token // a.block_size)
            offset = token % a.block_size
            for rows, cache in ((a.key, a.key_cache), (a.value, a.value_cache)):
                rows[row] = 0 if block is None else cache[block, offset]
            row += 1


def _block(a: Args, request: int, column: int) -> int | None:
    """Block id in a column, or None where there is no such column or block."""
    if not 0 <= column < a.block_tables.shape[1]:
        return None
    block = int(a.block_tables[request, column])
    return block if 0 <= block < a.key_cache.shape[0] else None

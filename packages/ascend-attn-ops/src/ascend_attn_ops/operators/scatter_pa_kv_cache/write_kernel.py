"""The loop of :mod:`compiled_write`: rows of tokens into slots of caches, as bytes."""

from __future__ import annotations

import numpy as np

from .._shared.numba_loops import Address, Bytes, Integers, kernel, loop, memory

NOWHERE = -1


@loop
def copy_rows(rows: Bytes, cache: Bytes, slots: Integers, tokens: int, plan: Integers) -> None:
    """Copy a row of each head of each token that has a slot; see ``compiled_write.PLAN``."""
    heads, size, row_token, row_head = plan[0], plan[1], plan[2], plan[3]
    block_size, block_step, token_step, head_step = plan[4], plan[5], plan[6], plan[7]
    for token in range(tokens):
        slot = slots[token]
        if slot < 0:
            continue
        place = slot // block_size * block_step + slot % block_size * token_step
        for head in range(heads):
            first = token * row_token + head * row_head
            source = rows[first : first + size]
            first = place + head * head_step
            target = cache[first : first + size]
            for i in range(size):
                target[i] = source[i]


@loop
def beyond(slots: Integers, tokens: int, end: int) -> int:
    """The first token whose slot is not in the cache, or -1."""
    for token in range(tokens):
        if slots[token] >= end:
            return token
    return NOWHERE


def _entry(
    key: Address,
    value: Address,
    key_cache: Address,
    value_cache: Address,
    slots: Address,
    plan: Address,
) -> int:
    numbers, places = memory(plan, np.int64), memory(slots, np.int64)
    tokens, end = numbers[0], numbers[1]
    wrong = beyond(places, tokens, end)
    if wrong == NOWHERE:
        for number, rows, cache in ((2, key, key_cache), (10, value, value_cache)):
            own, target = memory(rows, np.uint8), memory(cache, np.uint8)
            copy_rows(own, target, places, tokens, numbers[number:])
    return wrong


WRITE = kernel(_entry, addresses=6)

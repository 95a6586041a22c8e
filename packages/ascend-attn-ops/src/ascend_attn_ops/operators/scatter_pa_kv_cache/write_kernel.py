"""The loop of :mod:`compiled_write`: rows of tokens into slots of caches, as bytes."""

from __future__ import annotations

from .._shared.numba_loops import Address, Bytes, Integers, integers, kernel, loop, octets

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
    numbers, places = integers(plan), integers(slots)
    tokens, end = numbers[0], numbers[1]
    wrong = beyond(places, tokens, end)
    if wrong == NOWHERE:
        copy_rows(octets(key), octets(key_cache), places, tokens, numbers[2:])
        copy_rows(octets(value), octets(value_cache), places, tokens, numbers[10:])
    return wrong


WRITE = kernel(_entry, addresses=6)

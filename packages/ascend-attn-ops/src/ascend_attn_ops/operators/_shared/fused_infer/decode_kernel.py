"""The loop of :mod:`compiled_decode`: attention of single query rows over blocks of a cache.

It is written for a compiler: eight keys at a time, so that a processor's vector registers hold what
is added up while eight rows of memory stream by. Only :mod:`compiled_decode` imports it.
"""

from __future__ import annotations

import math

import numpy as np

from ..numba_loops import Address, Blocks, Floats, Integers, kernel, loop, memory

HEAD = 24  # numbers of a plan before those of its rows
NOWHERE = -1
_HALVINGS = 7
_SMALLEST = np.float32(-88.0)  # below, exp is no normal float32


@loop
def fill(row: Floats, size: int, value: np.float32) -> None:
    """Set the first elements of a row."""
    for i in range(size):
        row[i] = value


@loop
def dot(left: Floats, right: Floats, size: int) -> np.float32:
    """Scalar product of two rows."""
    total = np.float32(0.0)
    for i in range(size):
        total += left[i] * right[i]
    return total


@loop
def add_dots(
    query: Floats, keys: Floats, step: int, size: int, scale: np.float32, scores: Floats
) -> None:
    """Add scaled products of a query [size] and eight keys, ``step`` apart, to their scores."""
    key0, key1 = keys[:size], keys[step : step + size]
    key2, key3 = keys[2 * step : 2 * step + size], keys[3 * step : 3 * step + size]
    key4, key5 = keys[4 * step : 4 * step + size], keys[5 * step : 5 * step + size]
    key6, key7 = keys[6 * step : 6 * step + size], keys[7 * step : 7 * step + size]
    dot0 = dot1 = dot2 = dot3 = dot4 = dot5 = dot6 = dot7 = np.float32(0.0)
    for i in range(size):
        element = query[i]
        dot0 += element * key0[i]
        dot1 += element * key1[i]
        dot2 += element * key2[i]
        dot3 += element * key3[i]
        dot4 += element * key4[i]
        dot5 += element * key5[i]
        dot6 += element * key6[i]
        dot7 += element * key7[i]
    scores[0] += dot0 * scale
    scores[1] += dot1 * scale
    scores[2] += dot2 * scale
    scores[3] += dot3 * scale
    scores[4] += dot4 * scale
    scores[5] += dot5 * scale
    scores[6] += dot6 * scale
    scores[7] += dot7 * scale


@loop
def add_rows(out: Floats, weights: Floats, values: Floats, step: int, size: int) -> None:
    """Add eight values, ``step`` apart, in their weights to an output [size]."""
    value0, value1 = values[:size], values[step : step + size]
    value2, value3 = values[2 * step : 2 * step + size], values[3 * step : 3 * step + size]
    value4, value5 = values[4 * step : 4 * step + size], values[5 * step : 5 * step + size]
    value6, value7 = values[6 * step : 6 * step + size], values[7 * step : 7 * step + size]
    weight0, weight1, weight2, weight3 = weights[0], weights[1], weights[2], weights[3]
    weight4, weight5, weight6, weight7 = weights[4], weights[5], weights[6], weights[7]
    for i in range(size):
        first = weight0 * value0[i] + weight1 * value1[i] + weight2 * value2[i]
        second = weight3 * value3[i] + weight4 * value4[i] + weight5 * value5[i]
        out[i] += first + second + weight6 * value6[i] + weight7 * value7[i]


@loop
def add_scores(
    queries: Floats,
    query_step: int,
    keys: Floats,
    key_step: int,
    size: int,
    scale: np.float32,
    scores: Floats,
    room: int,
    group: int,
    count: int,
) -> None:
    """Add scaled products of a group of queries [size] with the keys of a block to their scores.

    Queries are ``query_step`` apart, keys ``key_step``, the scores of two queries ``room``.
    """
    together = count - count % 8
    for token in range(0, together, 8):
        for h in range(group):
            query, eight = queries[h * query_step :], keys[token * key_step :]
            add_dots(query, eight, key_step, size, scale, scores[h * room + token :])
    for token in range(together, count):
        for h in range(group):
            product = dot(queries[h * query_step :], keys[token * key_step :], size)
            scores[h * room + token] += product * scale


@loop
def add_values(
    outs: Floats, weights: Floats, room: int, values: Floats, step: int, size: int,
    group: int, count: int,
) -> None:  # fmt: skip
    """Add the values of a block, ``step`` apart, in their weights to a group of outputs [size]."""
    together = count - count % 8
    for token in range(0, together, 8):
        for h in range(group):
            out, own = outs[h * size : (h + 1) * size], weights[h * room + token :]
            add_rows(out, own, values[token * step :], step, size)
    for token in range(together, count):
        value = values[token * step :]
        for h in range(group):
            weight = weights[h * room + token]
            for i in range(size):
                outs[h * size + i] += weight * value[i]


@loop
def softmax(scores: Floats, length: int) -> np.float32:
    """Turn scores into weights, in place; returns the natural log of the sum of their powers.

    exp(x) is exp(x / 2**7) ** 2**7 by eleven terms of its series, in float64: the error is 6e-9
    of the value for every x from -88 on, and unlike a library's exp it is computed for several x
    at once.
    """
    largest = scores[0]
    for i in range(1, length):
        largest = max(largest, scores[i])
    total = 0.0
    for i in range(length):
        x = np.float64(max(scores[i] - largest, _SMALLEST)) / (1 << _HALVINGS)
        power = 1.0 + x / 11.0
        power = 1.0 + x / 10.0 * power
        power = 1.0 + x / 9.0 * power
        power = 1.0 + x / 8.0 * power
        power = 1.0 + x / 7.0 * power
        power = 1.0 + x / 6.0 * power
        power = 1.0 + x / 5.0 * power
        power = 1.0 + x / 4.0 * power
        power = 1.0 + x / 3.0 * power
        power = 1.0 + x / 2.0 * power
        power = 1.0 + x * power
        for _ in range(_HALVINGS):
            power *= power
        scores[i] = np.float32(power)
        total += power
    share = np.float32(1.0 / total)
    for i in range(length):
        scores[i] *= share
    return np.float32(largest + math.log(total))


@loop
def attend_rows(
    query: Floats,
    query_rope: Floats,
    key: Floats,
    key_rope: Floats,
    value: Floats,
    out: Floats,
    lse: Floats,
    scratch: Floats,
    scale: np.float32,
    table: Blocks,
    plan: Integers,
) -> None:
    """Attention of the rows of a plan, whose numbers are those of ``compiled_decode.PLAN``.

    Every array begins with the first element of its tensor and does not end.
    """
    rows, heads, kv_heads, size, rope, value_size = (
        plan[0], plan[1], plan[2], plan[3], plan[4], plan[5],
    )  # fmt: skip
    query_row, query_head, rope_row, rope_head = plan[6], plan[7], plan[8], plan[9]
    key_block, key_head, key_token = plan[10], plan[11], plan[12]
    turned_block, turned_head, turned_token = plan[13], plan[14], plan[15]
    value_block, value_head, value_token = plan[16], plan[17], plan[18]
    block_size, table_row, room, with_lse = plan[19], plan[20], plan[21], plan[22]
    group = heads // kv_heads
    for row in range(rows):
        first_of_row = HEAD + 3 * row
        number, request, length = plan[first_of_row], plan[first_of_row + 1], plan[first_of_row + 2]
        own = table[request * table_row :]
        for kv_head in range(kv_heads):
            head = kv_head * group
            for h in range(group):
                fill(scratch[h * room :], length, np.float32(0.0))
            queries = query[number * query_row + head * query_head :]
            turned = query_rope[number * rope_row + head * rope_head :]
            outs = out[(number * heads + head) * value_size :]
            for first in range(0, length, block_size):
                block, count = own[first // block_size], min(block_size, length - first)
                keys = key[block * key_block + kv_head * key_head :]
                ropes = key_rope[block * turned_block + kv_head * turned_head :]
                scores = scratch[first:]
                add_scores(
                    queries, query_head, keys, key_token, size, scale, scores, room, group, count
                )
                if rope:
                    add_scores(
                        turned, rope_head, ropes, turned_token, rope, scale, scores, room, group,
                        count,
                    )  # fmt: skip
            for h in range(group):
                result = softmax(scratch[h * room :], length)
                if with_lse:
                    lse[number * heads + head + h] = result
                fill(outs[h * value_size :], value_size, np.float32(0.0))
            for first in range(0, length, block_size):
                block, count = own[first // block_size], min(block_size, length - first)
                values = value[block * value_block + kv_head * value_head :]
                weights = scratch[first:]
                add_values(outs, weights, room, values, value_token, value_size, group, count)


@loop
def absent(table: Blocks, cache_blocks: int, plan: Integers) -> int:
    """Where the first block that a row reads is not in the cache: row << 32 | column, or -1."""
    rows, block_size, table_row = plan[0], plan[19], plan[20]
    for row in range(rows):
        request, length = plan[HEAD + 3 * row + 1], plan[HEAD + 3 * row + 2]
        for column in range((length + block_size - 1) // block_size):
            block = table[request * table_row + column]
            if block < 0 or block >= cache_blocks:
                return row << 32 | column
    return NOWHERE


def _entry(
    query: Address,
    query_rope: Address,
    key: Address,
    key_rope: Address,
    value: Address,
    out: Address,
    lse: Address,
    scratch: Address,
    scale: Address,
    table: Address,
    plan: Address,
) -> int:
    numbers, own = memory(plan, np.int64), memory(table, np.int32)
    wrong = absent(own, numbers[23], numbers)
    if wrong == NOWHERE:
        attend_rows(
            memory(query, np.float32), memory(query_rope, np.float32), memory(key, np.float32),
            memory(key_rope, np.float32), memory(value, np.float32), memory(out, np.float32),
            memory(lse, np.float32), memory(scratch, np.float32), memory(scale, np.float32)[0],
            own, numbers,
        )  # fmt: skip
    return wrong


ATTEND = kernel(_entry, addresses=11)

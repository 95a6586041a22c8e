"""The blocks of a call and what they cost.

A *row* is one block of the fused (query, group) axis of one (request, key head) pair ``bn``; its
*blocks* are the runs of keys that its mask lets it see.
"""

from __future__ import annotations

import attrs
import numpy as np

from .arguments import FlashAttnMetadataArguments as Args
from .blocks import BlockSizes
from .lengths import Ints, kv_lengths, query_lengths


def block_cost(rows: Ints | int, columns: Ints | int) -> Ints:
    """Cost of one block in the balancer's own unit; 6 per 16 rows and 10 per 64 keys.

    Source: ops-transformer section_stream_k_impl.h.
    """
    return np.asarray(6 * -(-rows // 16) + 10 * -(-columns // 64), dtype=np.int64)


@attrs.frozen(eq=False)
class Grid:
    """Every row in (bn, m) order.

    Attributes:
        heads: B * Nkv, the number of bn indices.
        row_of_head: (heads + 1,) first row of each bn.
        bn: (R,) bn index.
        m: (R,) row block index within the bn.
        first: (R,) first visible key block.
        blocks: (R,) visible key blocks, 0 for a row that sees no key.
        full: (R,) cost of a block that is not the last of its row.
        last: (R,) cost of the last block.
        rows: (R,) query rows, fewer than the block size at the end of a bn.
        head_bytes: (heads,) bytes that the queries, outputs, keys and values of a bn take.
        tallest: Largest number of query rows of a bn.
    """

    heads: int
    row_of_head: Ints
    bn: Ints
    m: Ints
    first: Ints
    blocks: Ints
    full: Ints
    last: Ints
    rows: Ints
    head_bytes: Ints
    tallest: int

    @property
    def cost(self) -> Ints:
        """(R,) cost of each row."""
        return np.where(self.blocks > 0, (self.blocks - 1) * self.full + self.last, 0)


def make_grid(a: Args, sizes: BlockSizes) -> Grid:
    """The grid of a call, without a loop over requests."""
    lq, lkv = query_lengths(a), kv_lengths(a)
    group = a.num_heads_q // a.num_heads_kv
    height = lq * group
    request = np.repeat(np.arange(len(lq)), a.num_heads_kv)  # of each bn
    counts = -(-height // sizes.m)
    row_of_head = np.concatenate(([0], np.cumsum(counts[request])))
    bn = np.repeat(np.arange(len(request)), counts[request])
    m = np.arange(len(bn)) - row_of_head[bn]
    of_row = request[bn]
    rows = np.minimum(height[of_row] - m * sizes.m, sizes.m)
    low, high = _queries(a, m * sizes.m, rows, lq[of_row], group)
    first, blocks = _key_blocks(a, low, high, lq[of_row], lkv[of_row], sizes.s2)
    full = block_cost(rows, sizes.s2)
    tail = lkv[of_row] - (first + blocks - 1) * sizes.s2  # keys of the last block, if it is short
    last = block_cost(rows, np.minimum(tail, sizes.s2))
    head_bytes = 4 * a.head_dim * (lq + lkv)[request]  # Q, O, K and V in half precision
    tallest = int(height.max(initial=0))
    return Grid(
        len(request), row_of_head, bn, m, first, blocks, full, last, rows, head_bytes, tallest
    )


def _queries(a: Args, start: Ints, rows: Ints, lq: Ints, group: int) -> tuple[Ints, Ints]:
    """First and last query of each row; a row that wraps around the heads covers them all."""
    stop = start + rows - 1
    if a.layouts[0] != "BNSD":  # the group index runs fastest
        return start // group, stop // group
    wraps = start // lq != stop // lq
    return np.where(wraps, 0, start % lq), np.where(wraps, lq - 1, stop % lq)


def _key_blocks(
    a: Args, low: Ints, high: Ints, lq: Ints, lkv: Ints, width: int
) -> tuple[Ints, Ints]:
    """First visible key block and their number, for queries low .. high of a request."""
    mode, (left, right) = a.mask_mode or 0, a.windows
    shift = lkv - lq
    no_left = mode != 4 or left == -1
    no_right = mode == 0 or (mode == 4 and right == -1)
    begin = np.zeros_like(low) if no_left else np.maximum(low + shift - left, 0)
    reach = high + shift + (right if mode == 4 else 0)
    end = lkv - 1 if no_right else np.minimum(reach, lkv - 1)
    seen = begin <= end
    first = np.where(seen, begin // width, 0)
    return first, np.where(seen, end // width + 1 - first, 0)

"""Reads a flash_attn plan and recomputes what it must say, block by block, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Call:
    """Lengths and mask of a call."""

    q_lens: list[int]
    kv_lens: list[int]
    group: int
    kv_heads: int
    mode: int
    left: int
    right: int
    group_outside: bool  # BNSD: the query index runs fastest in the fused rows

    def visible(self, request: int, query: int, key: int) -> bool:
        centre = query + self.kv_lens[request] - self.q_lens[request]
        if self.mode == 0:
            return True
        if self.mode == 3:
            return key <= centre
        below = self.left == -1 or key >= centre - self.left
        return below and (self.right == -1 or key <= centre + self.right)

    def query_of(self, request: int, row: int) -> int:
        return row % self.q_lens[request] if self.group_outside else row // self.group


@dataclass
class Plan:
    """The records of a plan, decoded by word position."""

    head: list[int]
    fa: list[list[list[int]]]
    fd: list[list[list[int]]]
    rest: torch.Tensor


def decode(words: torch.Tensor) -> Plan:
    head = words[:16].tolist()
    sections, cube, vector = head[0], head[4], head[5]
    split = 16 + sections * cube * 16
    end = split + sections * vector * 16
    fa = words[16:split].view(sections, cube, 16)
    fd = words[split:end].view(sections, vector, 16)
    used_fa = [[r for r in s.tolist() if any(r)] for s in fa]
    used_fd = [[r for r in s.tolist() if any(r)] for s in fd]
    return Plan(head, used_fa, used_fd, words[end:])


def rows_of(call: Call, bn: int, m: int, height: int) -> int:
    """Query rows of a row block."""
    return min(call.q_lens[bn // call.kv_heads] * call.group - m * height, height)


def visible_blocks(call: Call, height: int, width: int) -> dict[tuple[int, int, int], int]:
    """Cost of every block (bn, m, s2) that some row of the block's span can see.

    The span of a row block is the range of its queries; one that wraps around the heads spans all.
    """
    blocks = {}
    for request, (lq, lkv) in enumerate(zip(call.q_lens, call.kv_lens, strict=True)):
        for m in range(-(-lq * call.group // height)):
            rows = rows_of(call, request * call.kv_heads, m, height)
            queries = {call.query_of(request, m * height + r) for r in range(rows)}
            wraps = call.group_outside and m * height // lq != (m * height + rows - 1) // lq
            span = range(lq) if wraps else range(min(queries), max(queries) + 1)
            seen = {k for k in range(lkv) if any(call.visible(request, q, k) for q in span)}
            for s2 in {k // width for k in seen}:
                columns = min(lkv - s2 * width, width)
                cost = 6 * -(-rows // 16) + 10 * -(-columns // 64)
                for head in range(call.kv_heads):
                    blocks[request * call.kv_heads + head, m, s2] = cost
    return dict(sorted(blocks.items()))


def least_makespan(units: list[int], cores: int) -> int:
    """Smallest possible cost of the slowest of ``cores`` contiguous runs, by trying limits."""
    limit = max(max(units), -(-sum(units) // cores))
    while True:
        used, load = 1, 0
        for unit in units:
            if load + unit > limit:
                used, load = used + 1, 0
            load += unit
        if used <= cores:
            return limit
        limit += 1

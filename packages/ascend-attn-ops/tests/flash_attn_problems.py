"""Random flash_attn calls in every layout, with a float64 oracle that loops over rows and keys."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
PAGED = ("PA_BBND", "PA_BNBD", "PA_NZ")
_POISON = float("nan")


@attrs.frozen
class Problem:
    """One call: geometry, lengths and mask."""

    layout_q: str
    layout_kv: str
    layout_out: str
    q_rooms: list[int]
    kv_rooms: list[int]
    q_used: list[int] | None
    kv_used: list[int] | None
    group: int
    kv_heads: int
    size: int
    block_size: int
    mode: int
    left: int
    right: int
    sinks: bool
    strided: bool
    seed: int

    @property
    def q_lens(self) -> list[int]:
        return self.q_used or self.q_rooms

    @property
    def kv_lens(self) -> list[int]:
        return self.kv_used or self.kv_rooms

    def visible(self, request: int, i: int, j: int) -> bool:
        centre = i + self.kv_lens[request] - self.q_lens[request]
        if self.mode == 0:
            return True
        if self.mode == 3:
            return j <= centre
        return (self.left == -1 or centre - self.left <= j) and (
            self.right == -1 or j <= centre + self.right
        )


@st.composite
def problems(draw: st.DrawFn, *, long: bool = False) -> Problem:
    layout_q = draw(st.sampled_from(["TND", "BSND", "BNSD"]))
    layout_kv = draw(st.sampled_from([layout_q, *PAGED]))
    layout_out = draw(st.sampled_from(["BNSD", "BSND"])) if layout_q == "BNSD" else layout_q
    requests = draw(st.integers(1, 4))

    def rooms(layout: str, most: int) -> list[int]:
        if layout == "TND":
            return draw(st.lists(st.integers(0, most), min_size=requests, max_size=requests))
        return [draw(st.integers(1, most))] * requests

    def used(rooms: list[int], must: bool) -> list[int] | None:
        if not must and draw(st.booleans()):
            return None
        return [draw(st.integers(0, room)) for room in rooms]

    q_rooms = rooms(layout_q, 40 if draw(st.booleans()) else 4)
    kv_rooms = rooms("" if layout_kv in PAGED else layout_kv, 70)
    mode = draw(st.sampled_from([0, 3, 4]))
    window = st.one_of(st.just(-1), st.integers(0, 30))
    return Problem(
        layout_q, layout_kv, layout_out, q_rooms, kv_rooms,
        used(q_rooms, False), used(kv_rooms, layout_kv in PAGED),
        group=draw(st.sampled_from([1, 2, 3, 4])),
        kv_heads=draw(st.sampled_from([1, 2])),
        size=draw(st.sampled_from([16, 32, 48])),
        block_size=draw(st.sampled_from([16, 32, 128])),
        mode=mode,
        left=draw(window) if mode == 4 else -1,
        right=draw(window) if mode == 4 else -1,
        sinks=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


@attrs.frozen(eq=False)
class Tensors:
    """Per-request rows: queries (room, Nq, D), keys and values (length, Nkv, D), and the sinks."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    sinks: torch.Tensor | None


def tensors_of(p: Problem, dtype: torch.dtype) -> Tensors:
    rng = torch.Generator().manual_seed(p.seed)

    def rows(lengths: list[int], heads: int) -> list[torch.Tensor]:
        return [torch.randn(n, heads, p.size, generator=rng).to(dtype) for n in lengths]

    return Tensors(
        rows(p.q_rooms, p.group * p.kv_heads),
        rows(p.kv_lens, p.kv_heads),
        rows(p.kv_lens, p.kv_heads),
        torch.linspace(-1, 2, p.group * p.kv_heads) if p.sinks else None,
    )


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefix_sums(lengths: list[int]) -> torch.Tensor:
    return ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def arguments_of(p: Problem, t: Tensors) -> dict[str, Any]:
    """The call; every slot that no length reads holds NaN."""
    arguments: dict[str, Any] = {
        "q": _laid_out(p.layout_q, t.queries),
        "softmax_scale": 0.3,
        "mask_mode": p.mode,
        "win_left": p.left,
        "win_right": p.right,
        "attn_mask": TEMPLATE if p.mode else None,
        "sinks": t.sinks,
        "max_seqlen_q": max(p.q_lens),
        "max_seqlen_kv": max(p.kv_lens),
        "layout_q": p.layout_q,
        "layout_kv": p.layout_kv,
        "layout_out": p.layout_out,
        "return_softmax_lse": True,
    }
    if p.layout_q == "TND":
        arguments["cu_seqlens_q"] = prefix_sums(p.q_rooms)
    if p.layout_kv == "TND":
        arguments["cu_seqlens_kv"] = prefix_sums(p.kv_rooms)
    if p.q_used is not None:
        arguments["seqused_q"] = ints(p.q_used)
    if p.kv_used is not None:
        arguments["seqused_kv"] = ints(p.kv_used)
    if p.layout_kv in PAGED:
        return arguments | _paged(p, t)
    for name, rows in (("k", t.keys), ("v", t.values)):
        padded = [_padded(r, room) for r, room in zip(rows, p.kv_rooms, strict=True)]
        arguments[name] = _laid_out(p.layout_kv, padded)
    return arguments


def _padded(rows: torch.Tensor, room: int) -> torch.Tensor:
    return torch.cat([rows, torch.full((room - len(rows), *rows.shape[1:]), _POISON).to(rows)])


def _laid_out(layout: str, rows: list[torch.Tensor]) -> torch.Tensor:
    if layout == "TND":
        return torch.cat(rows)
    stacked = torch.stack(rows)
    return stacked if layout == "BSND" else stacked.transpose(1, 2).contiguous()


def _paged(p: Problem, t: Tensors) -> dict[str, Any]:
    """Blocks in a random order; ids of unused columns are not blocks at all."""
    rng = torch.Generator().manual_seed(p.seed + 1)
    columns = max(-(-n // p.block_size) for n in p.kv_lens) + 1
    blocks = columns * len(p.kv_lens) + 2
    order = torch.randperm(blocks, generator=rng).tolist()
    table = torch.full((len(p.kv_lens), columns), -7, dtype=torch.int32)
    caches = {}
    for request, length in enumerate(p.kv_lens):
        for column in range(-(-length // p.block_size)):
            table[request, column] = order[request * columns + column]
    for name, rows in (("k", t.keys), ("v", t.values)):
        cache = _empty_cache(p, blocks, rows[0].dtype)
        for request, length in enumerate(p.kv_lens):
            for position in range(length):
                block = int(table[request, position // p.block_size])
                _write(p, cache, block, position % p.block_size, rows[request][position])
        caches[name] = cache
    return {**caches, "block_table": table}


def _empty_cache(p: Problem, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    shape = {
        "PA_BBND": (blocks, p.block_size, p.kv_heads, p.size),
        "PA_BNBD": (blocks, p.kv_heads, p.block_size, p.size),
        "PA_NZ": (blocks, p.kv_heads, p.size // 16, p.block_size, 16),
    }[p.layout_kv]
    if not p.strided:
        return torch.full(shape, _POISON, dtype=dtype)
    axis = 1 if p.layout_kv == "PA_BBND" else 2  # the storage is one longer here
    longer = (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])
    return torch.full(longer, _POISON, dtype=dtype).narrow(axis, 0, shape[axis])


def _write(p: Problem, cache: torch.Tensor, block: int, slot: int, row: torch.Tensor) -> None:
    if p.layout_kv == "PA_BBND":
        cache[block, slot] = row
    elif p.layout_kv == "PA_BNBD":
        cache[block, :, slot] = row
    else:
        cache[block, :, :, slot] = row.view(p.kv_heads, -1, 16)


def expected(p: Problem, t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in the operator's layouts, float64, row by row from the formula."""
    heads = p.group * p.kv_heads
    outs, lses = [], []
    for request, room in enumerate(p.q_rooms):
        out = torch.zeros(room, heads, p.size, dtype=torch.float64)
        lse = torch.full((room, heads), math.inf, dtype=torch.float64)
        key, value = t.keys[request].double(), t.values[request].double()
        for i in range(p.q_lens[request]):
            seen = [j for j in range(p.kv_lens[request]) if p.visible(request, i, j)]
            if not seen:
                continue
            for head in range(heads):
                row = t.queries[request][i, head].double()
                scores = 0.3 * (key[seen, head // p.group] @ row)
                extra = [float(t.sinks[head])] if t.sinks is not None else []
                top = max([float(scores.max()), *extra])
                weights = (scores - top).exp()
                total = float(weights.sum()) + sum(math.exp(sink - top) for sink in extra)
                out[i, head] = weights @ value[seen, head // p.group] / total
                lse[i, head] = top + math.log(total)
        outs.append(out)
        lses.append(lse)
    out = _laid_out(p.layout_out, outs)
    return out, torch.cat(lses).T if p.layout_q == "TND" else torch.stack(lses).transpose(1, 2)

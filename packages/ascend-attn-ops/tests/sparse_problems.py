"""Random calls of the sparse attention family: per-request data, and the same in any layout."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from hypothesis import strategies as st

INT = torch.int32


@attrs.frozen
class Shape:
    """What is drawn for one call."""

    q_lens: list[int]
    kv_lens: list[int]
    layout_query: str
    layout_kv: str
    block_size: int
    mode: int
    apart: bool  # paged caches whose blocks lie apart
    seed: int

    def rng(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@st.composite
def shapes(draw: st.DrawFn, longest: int = 40) -> Shape:
    requests = draw(st.integers(1, 4))

    def lens(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=requests, max_size=requests))

    layout_query = draw(st.sampled_from(["TND", "BSND"]))
    return Shape(
        lens(5),
        lens(longest),
        layout_query,
        draw(st.sampled_from([layout_query, "PA_BSND", "PA_BSND"])),
        draw(st.sampled_from([16, 32, 48, 128, 1024])),
        draw(st.sampled_from([0, 3, 3])),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


def lay_out_rows(s: Shape, parts: list[torch.Tensor], fill: float = 7.0) -> torch.Tensor:
    """Query-like per-request rows [Lq, ...] in the query layout; padding rows hold ``fill``."""
    if s.layout_query == "TND":
        rows = torch.cat(parts)
        padding = torch.full((padding_rows(s), *rows.shape[1:]), fill).to(rows.dtype)
        return torch.cat([rows, padding])
    out = torch.full((len(parts), row_room(s), *parts[0].shape[1:]), fill).to(parts[0].dtype)
    for b, part in enumerate(parts):
        out[b, : len(part)] = part
    return out


def padding_rows(s: Shape) -> int:
    """TND calls with an odd seed, and those without rows, get rows that belong to no request."""
    return 2 if s.seed % 2 or not sum(s.q_lens) else 0


def row_room(s: Shape) -> int:
    return max(s.q_lens) + 1


def real_rows(s: Shape, out: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rows of each request, and all padding rows, of an output in the query layout."""
    if s.layout_query == "TND":
        total = sum(s.q_lens)
        return list(out[:total].split(s.q_lens)), out[total:]
    pads = [out[b, n:] for b, n in enumerate(s.q_lens)]
    return [out[b, :n] for b, n in enumerate(s.q_lens)], torch.cat(pads)


def query_lengths(s: Shape) -> torch.Tensor:
    lengths = torch.tensor(s.q_lens, dtype=INT)
    return lengths.cumsum(0).to(INT) if s.layout_query == "TND" else lengths


def key_lengths(s: Shape) -> torch.Tensor:
    lengths = torch.tensor(s.kv_lens, dtype=INT)
    return lengths.cumsum(0).to(INT) if s.layout_kv == "TND" else lengths


def table(s: Shape) -> torch.Tensor | None:
    """Shuffled blocks; columns that no length reads hold nonsense."""
    if s.layout_kv != "PA_BSND":
        return None
    columns = max(-(-n // s.block_size) for n in s.kv_lens) or 1
    count = columns * len(s.kv_lens)
    ids = torch.randperm(count + 1, generator=s.rng())[:count].view(-1, columns).to(INT)
    for b, n in enumerate(s.kv_lens):
        ids[b, -(-n // s.block_size) :] = -7
    return ids


def lay_out_keys(s: Shape, parts: list[torch.Tensor], fill: float = 9.0) -> torch.Tensor:
    """Key-like per-request rows [Lkv, ...] as [..., 1, ...] in the key layout."""
    tail, dtype = parts[0].shape[1:], parts[0].dtype
    ids = table(s)
    if s.layout_kv == "TND":
        rows = torch.cat(parts)[:, None]
        return rows if len(rows) else torch.full((1, 1, *tail), fill).to(dtype)
    if ids is None:
        out = torch.full((len(parts), max(s.kv_lens) + 1, 1, *tail), fill).to(dtype)
        for b, part in enumerate(parts):
            out[b, : len(part), 0] = part
        return out
    blocks = ids.numel() + 1
    store = torch.full((blocks, 2 if s.apart else 1, s.block_size, 1, *tail), fill).to(dtype)
    cache = store[:, -1]
    for b, part in enumerate(parts):
        for position, row in enumerate(part):
            block = int(ids[b, position // s.block_size])
            cache[block, position % s.block_size, 0] = row
    return cache


def lengths_and_table(s: Shape, key_name: str) -> dict[str, Any]:
    """Layouts, lengths and block table by parameter name; ``key_name`` is kv or key."""
    return {
        "layout_query": s.layout_query,
        f"layout_{key_name}": s.layout_kv,
        "actual_seq_lengths_query": query_lengths(s),
        f"actual_seq_lengths_{key_name}": key_lengths(s),
        "block_table": table(s),
        "sparse_mode": s.mode,
    }

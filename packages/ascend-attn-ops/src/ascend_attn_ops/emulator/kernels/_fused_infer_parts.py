"""The requests of a fused_infer_attention_score call, each as dense tensors, and their way back.

Layouts are taken apart by name: BSH, BSND, BNSD, NBSD, TND, NTD; ``A_B`` reads A and writes B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from ..abi import NOT_EMULATED, AclnnError
from ._sequences import lengths_of

_PACKED = ("TND", "NTD")
_QUANTISATION = (
    "dequant_scale1", "quant_scale1", "dequant_scale2", "antiquant_scale", "antiquant_offset",
    "key_antiquant_offset", "value_antiquant_offset", "key_rope_antiquant_scale",
    "dequant_scale_query",
)  # fmt: skip
# (B, S, N, D) of a batched layout with N heads, and back
_TO_BSND: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "BSH": lambda t, heads: t.unflatten(-1, (heads, -1)),
    "BSND": lambda t, heads: t,
    "BNSD": lambda t, heads: t.transpose(1, 2),
    "NBSD": lambda t, heads: t.permute(1, 2, 0, 3),
}


@attrs.frozen(eq=False)
class Part:
    """One request in float64.

    Attributes:
        request: Its number.
        start: First query row, for packed layouts and left padding.
        query: (Lq, N, D), rotary part appended.
        key: (Lkv, KN, D), rotary part appended.
        value: (Lkv, KN, VD).
        hidden: bool (Lq, Lkv): keys that a row may not see.
        shift: (N, Lq, Lkv) or None.
    """

    request: int
    start: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    hidden: torch.Tensor
    shift: torch.Tensor | None


def no_unknown_quantisation(a: Any) -> None:
    """Refuse arithmetic whose rounding no document states, rather than guess it."""
    given = [name for name in _QUANTISATION if getattr(a, name, None) is not None]
    if a.query.dtype == torch.int8 or given:
        raise AclnnError(
            NOT_EMULATED, f"quantised arithmetic is not emulated: {given or 'int8 query'}"
        )
    for name, mode in (("key", a.key_antiquant_mode), ("value", a.value_antiquant_mode)):
        if getattr(a, f"{name}_antiquant_scale") is not None and mode != 0:
            raise AclnnError(NOT_EMULATED, f"{name}_antiquant_mode {mode} is not emulated, only 0")


def parts(a: Any) -> list[Part]:
    """All requests of a call."""
    base = a.input_layout.split("_")[0]
    packed = base in _PACKED
    queries, starts = _queries(a, base, packed)
    keys = _keys(a, a.key, a.key_antiquant_scale, base, packed, len(queries))
    values = _keys(a, a.value, a.value_antiquant_scale, base, packed, len(queries))
    if a.key_rope is not None:
        ropes = _keys(a, [a.key_rope], None, base, packed, len(queries))
        keys = [torch.cat(pair, -1) for pair in zip(keys, ropes, strict=True)]
    keys = _behind_prefix(a, keys, a.key_shared_prefix, base)
    values = _behind_prefix(a, values, a.value_shared_prefix, base)
    return [
        Part(
            b, starts[b], queries[b].double(), keys[b], values[b],
            _hidden(a, b, len(queries[b]), len(keys[b]), packed),
            _shift(a, b, len(queries[b]), len(keys[b])),
        )
        for b in range(len(queries))
    ]  # fmt: skip


def _queries(a: Any, base: str, packed: bool) -> tuple[list[torch.Tensor], list[int]]:
    query = _query_rows(a.query, base, a.num_heads)
    if a.query_rope is not None:
        query = torch.cat([query, _query_rows(a.query_rope, base, a.num_heads)], -1)
    if packed:
        lengths = lengths_of(a.actual_seq_lengths)
        starts = [end - length for end, length in zip(a.actual_seq_lengths, lengths, strict=True)]
        return list(query[: a.actual_seq_lengths[-1]].split(lengths)), starts
    room = query.shape[1]
    lengths = _each(a.actual_seq_lengths, query.shape[0], room)
    starts = [_left(a.query_padding_size, room, length) for length in lengths]
    return [
        query[b, start : start + length]
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ], starts


def _query_rows(tensor: torch.Tensor, base: str, heads: int) -> torch.Tensor:
    """(T, N, D) or (B, S, N, D)."""
    if base in _PACKED:
        return tensor if base == "TND" else tensor.transpose(0, 1)
    return _TO_BSND[base](tensor, heads)


def _each(given: Sequence[int] | None, batch: int, default: int) -> list[int]:
    """One length per request: none given, one for all, or (at least) one each."""
    if given is None:
        return [default] * batch
    return list(given) * batch if len(given) == 1 else list(given[:batch])


def _left(padding: torch.Tensor | None, room: int, length: int) -> int:
    """First row of a left-padded request: ``padding`` rows stay free behind it."""
    return 0 if padding is None else max(0, room - length - int(padding.max()))


def _keys(
    a: Any,
    tensors: Sequence[torch.Tensor],
    scale: torch.Tensor | None,
    base: str,
    packed: bool,
    batch: int,
) -> list[torch.Tensor]:
    """float64 (Lkv, KN, D) of each request."""
    heads = a.num_key_value_heads or a.num_heads
    if a.block_table is not None:
        cache = _cache_rows(tensors[0], heads)
        found = [
            cache[a.block_table[b, : -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
            for b, length in enumerate(_each(a.actual_seq_lengths_kv, batch, 0))
        ]
    elif packed:
        rows = _query_rows(tensors[0], base, heads)
        ends = a.actual_seq_lengths_kv
        found = list(rows[: ends[-1]].split(lengths_of(ends)))
    else:
        found = _batched_keys(a, [_query_rows(t, base, heads) for t in tensors], batch)
    wide = [rows.double() for rows in found]
    return wide if scale is None else [rows * _channels(scale, heads) for rows in wide]


def _batched_keys(a: Any, rows: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
    """A tensor (B, S, KN, D), or a list of tensors of batch 1."""
    each = list(rows[0]) if len(rows) == 1 else [tensor[0] for tensor in rows]
    default = max((len(one) for one in each), default=0)
    lengths = [
        min(length, len(one))
        for length, one in zip(_each(a.actual_seq_lengths_kv, batch, default), each, strict=True)
    ]
    starts = [
        _left(a.kv_padding_size, len(one), length)
        for one, length in zip(each, lengths, strict=True)
    ]
    return [
        one[start : start + length]
        for one, start, length in zip(each, starts, lengths, strict=True)
    ]


def _cache_rows(cache: torch.Tensor, heads: int) -> torch.Tensor:
    """(nb, bs, KN, D) of a flat, head-first or NZ cache."""
    if cache.dim() == 3:
        return torch.unflatten(cache, -1, (heads, -1))
    if cache.dim() == 4:
        return cache.transpose(1, 2)
    return cache.permute(0, 3, 1, 2, 4).flatten(3)


def _channels(scale: torch.Tensor, heads: int) -> torch.Tensor:
    """Mode 0: one scale for all, or one for each head and channel."""
    wide = scale.double()
    return wide.view(heads, -1) if wide.numel() > 1 else wide.view(1, 1)


def _behind_prefix(
    a: Any, rows: list[torch.Tensor], prefix: torch.Tensor | None, base: str
) -> list[torch.Tensor]:
    if prefix is None:
        return rows
    shared = _query_rows(prefix, base, a.num_key_value_heads or a.num_heads)[0].double()
    used = a.actual_shared_prefix_len
    shared = shared if used is None else shared[: used[0]]
    return [torch.cat([shared, own]) for own in rows]


def _hidden(a: Any, b: int, rows: int, keys: int, packed: bool) -> torch.Tensor:
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None]
    mode = a.sparse_mode
    single = not packed and a.query_rope is None and _room(a) == 1
    full = a.atten_mask is not None and (mode in (0, 1) or (single and mode in (2, 3, 4)))
    if single and mode in (2, 3, 4) and not _is_template(a.atten_mask):
        mode = 1  # one query row: the mode is ignored, a mask of the keys' size is read
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if mode == 0 and a.atten_mask is not None:
        hidden |= (j < i - a.pre_tokens) | (j > i + a.next_tokens)
    elif mode == 2:
        hidden |= j > i
    elif mode == 3:
        hidden |= j > i + keys - rows
    elif mode == 4:
        hidden |= (j < i + keys - rows - a.pre_tokens) | (j > i + keys - rows + a.next_tokens)
    if full and mode not in (2, 3, 4):
        hidden |= _mask_of(a.atten_mask, b, rows)[:rows, :keys]
    return hidden


def _room(a: Any) -> int:
    base = a.input_layout.split("_")[0]
    return int(a.query.shape[2 if base == "BNSD" else 1])


def _is_template(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.shape[-2:] == (2048, 2048)


def _mask_of(mask: torch.Tensor, b: int, rows: int) -> torch.Tensor:
    """(S, KS) of a request; a matrix of one query row holds one row for each request."""
    if mask.dim() == 2:
        return mask[b % len(mask)][None].bool() if rows == 1 else mask.bool()
    flat = mask.reshape(-1, *mask.shape[-2:])
    return flat[b % len(flat)].bool()


def _shift(a: Any, b: int, rows: int, keys: int) -> torch.Tensor | None:
    if a.pse_shift is None:
        return None
    shift: torch.Tensor = a.pse_shift[b % len(a.pse_shift), :, :rows, :keys].double()
    return shift


def place_outputs(
    a: Any, results: Sequence[tuple[Part, torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs in the layout of the call; rows of no request are 0 and +inf."""
    base, target = a.input_layout.split("_")[0], a.input_layout.split("_")[-1]
    packed = base in _PACKED
    lead = (_query_rows(a.query, base, a.num_heads)).shape[: 1 if packed else 2]
    size = results[0][1].shape[-1]
    out = torch.zeros((*lead, a.num_heads, size), dtype=torch.float64)
    lse = torch.full((*lead, a.num_heads), torch.inf, dtype=torch.float64)
    for part, rows, sums in results:
        span = slice(part.start, part.start + len(rows))
        where = (span,) if packed else (part.request, span)
        out[where], lse[where] = rows, sums
    if packed:
        return (out if target == "TND" else out.transpose(0, 1)), lse[..., None]
    return _from_bsnd(out, target), lse.transpose(1, 2)[..., None]


def _from_bsnd(out: torch.Tensor, target: str) -> torch.Tensor:
    orders = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "NBSD": (2, 0, 1, 3)}
    return out.flatten(2) if target == "BSH" else out.permute(orders[target])

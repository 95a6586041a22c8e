"""Implementations of quant_lightning_indexer_v2, and the vendor call as data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...arguments import parameters
from ...operator import NpuCall
from .._shared.reference_rows import Row
from .._shared.sequences import KeyRows, QueryRows
from .._shared.top_keys import KeyScoring, best_keys
from ..lightning_indexer.reference import choose_row_by_row, shaped_choice
from .arguments import QuantLightningIndexerV2Arguments as Args

_MXFP8 = 3
_HOST_MODES = {1: "float8_e4m3fn", 2: "int8", _MXFP8: "mxfp8"}


def host_gap(a: Args) -> str | None:
    """Number formats and extensions that the host providers do not implement."""
    if a.quant_mode not in _HOST_MODES:
        return f"quant_mode {a.quant_mode}: hifloat8 and mxfp4 are not decoded on the host"
    if a.output_idx_offset is not None:
        return "output_idx_offset: the documents do not define its shape (unverified)"
    if a.candidate_mode != 3:
        return "candidate blocks: the documents do not define their tensors (unverified)"
    return None


def run_reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The best keys of every row, over dequantised queries and keys in float32."""
    query = dequantised(a, a.q, a.q_descale)
    query = query.reshape(-1, *query.shape[-2:])
    key = dequantised(a, a.k, a.k_descale)
    keys = [_request_keys(a, key, request) for request in range(a.batch)]
    weights = a.w.reshape(len(query), -1).float()
    rows = _real_rows(a, [len(rows) for rows in keys])
    positions, values = choose_row_by_row(rows, query, weights, keys, a.topk)
    return _shaped(a, positions, values)


def dequantised(a: Args, quantised: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values; mxfp8 has a scale for each group of 32 elements."""
    if a.quant_mode != _MXFP8:
        return quantised.float() * scale.float()[..., None]
    return quantised.float() * scale.float().flatten(-2).repeat_interleave(32, -1)


def _span(
    layout: str,
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    used: torch.Tensor | None,
    request: int,
) -> tuple[int, int]:
    """First row and number of used rows of a request; paged ones begin at 0."""
    if layout == "TND":
        assert ends is not None  # noqa: S101 - the contract guarantees it
        start, length = int(ends[request]), int(ends[request + 1] - ends[request])
    else:
        start, length = request * rows.shape[1], rows.shape[1]
    return start, length if used is None else int(used[request])


def _request_keys(a: Args, key: torch.Tensor, request: int) -> torch.Tensor:
    start, length = _span(a.layout_k, a.k, a.cu_seqlens_k, a.seqused_k, request)
    if a.block_table is None:
        return key.reshape(-1, key.shape[-1])[start : start + length]
    blocks = a.block_table[request, : -(-length // a.k.shape[1])].long()
    return key[blocks].flatten(0, 2)[:length]


def _real_rows(a: Args, kv_lens: list[int]) -> Iterator[Row]:
    for request, kv_len in enumerate(kv_lens):
        start, length = _span(a.layout_q, a.q, a.cu_seqlens_q, a.seqused_q, request)
        residual = 0 if a.cmp_residual_k is None else int(a.cmp_residual_k[request])
        for i in range(length):
            original = kv_len * a.cmp_ratio + residual - length + i + 1
            limit = min(original // a.cmp_ratio, kv_len) if a.mask_mode == 3 else kv_len
            yield Row(start + i, request, limit)


def run_cpu(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The best keys of all rows in tiles; keys are dequantised as they are read."""
    rows, keys = _query_rows(a), _key_rows(a)
    query = dequantised(a, a.q, a.q_descale)
    groups = a.k_descale.flatten(-2) if a.quant_mode == _MXFP8 else a.k_descale[..., None]

    def read(request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        raw = keys.read(a.k.view(torch.uint8), request, position).view(a.k.dtype)
        scale = keys.read(groups.float(), request, position)
        return raw.float() * scale.repeat_interleave(raw.shape[-1] // scale.shape[-1], -1)

    scoring = KeyScoring(
        query=query.reshape(-1, *query.shape[-2:]),
        weights=a.w.reshape(-1, a.w.shape[-1]),
        rows=rows,
        keys=keys,
        seen=_seen(a, rows, keys),
        read=read,
        count=a.topk,
    )
    return _shaped(a, *best_keys(scoring))


def _query_rows(a: Args) -> QueryRows:
    starts, lengths = _spans(a.layout_q, a.q, a.cu_seqlens_q, a.seqused_q, a.batch)
    return QueryRows.from_spans(starts, lengths, a.q.shape[:-2].numel())


def _key_rows(a: Args) -> KeyRows:
    starts, lengths = _spans(a.layout_k, a.k, a.cu_seqlens_k, a.seqused_k, a.batch)
    if a.block_table is None:
        return KeyRows(lengths, starts)
    return KeyRows(lengths, starts, a.block_table, a.k.shape[1])


def _spans(
    layout: str,
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    used: torch.Tensor | None,
    batch: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "TND":
        assert ends is not None  # noqa: S101 - the contract guarantees it
        starts, lengths = ends[:-1].long(), ends.long().diff()
    else:
        starts = torch.arange(batch) * rows.shape[1]
        lengths = torch.full((batch,), rows.shape[1])
    return starts, lengths if used is None else used.long()


def _seen(a: Args, rows: QueryRows, keys: KeyRows) -> torch.Tensor:
    seen = keys.lengths[rows.request]
    if a.mask_mode == 3:
        original = seen * a.cmp_ratio - rows.lengths[rows.request] + rows.position + 1
        if a.cmp_residual_k is not None:
            original = original + a.cmp_residual_k.long()[rows.request]
        visible = torch.div(original, a.cmp_ratio, rounding_mode="floor").clamp(min=0)
        seen = torch.minimum(visible, seen)
    return seen.masked_fill(~rows.real, 0)


def _shaped(
    a: Args, positions: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return shaped_choice(
        a.q, positions, values, dtype=torch.bfloat16, values_wanted=a.return_value == 1
    )


def cann_ops_transformer_call(a: Args) -> NpuCall:
    """Seven positional arguments, by name what differs from its default, and always the layouts.

    The candidate arguments of vllm-ascend's private operator are left out: with candidate_mode 3
    they say nothing, and other modes are a gap.
    """
    kwargs = {
        p.name: value
        for p in parameters(Args)
        if p.keyword_only
        and not p.name.startswith("candidate_")
        and (value := getattr(a, p.name)) is not None
        and (p.kind == "tensor" or p.name.startswith("layout_") or value != p.default)
    }
    positional = (a.q, a.k, a.w, a.q_descale, a.k_descale, a.topk, a.quant_mode)
    return NpuCall("quant_lightning_indexer", positional, kwargs)


def npu_gap(a: Args) -> str | None:
    """The extension belongs to another operator."""
    if a.candidate_mode == 3:
        return None
    return "candidate blocks are an extension of vllm-ascend's private operator"

"""Implementations of quant_lightning_indexer, and the vendor call as data."""

from __future__ import annotations

import torch

from ...operator import NpuCall
from .._shared.reference_rows import real_rows, request_keys
from .._shared.sequences import visible_keys
from .._shared.top_keys import KeyScoring, best_keys
from .._shared.vendor_call import call_like_record
from ..lightning_indexer.reference import choose_row_by_row, shaped_choice
from .arguments import QuantLightningIndexerArguments as Args


def host_gap(a: Args) -> str | None:
    """The bytes of hifloat8 are not decoded."""
    return "hifloat8 is not decoded on the host" if a.hifloat8 else None


def run_reference(a: Args) -> torch.Tensor:
    """The best keys of every row, over dequantised queries and keys in float32."""
    s = a.sequences
    query = a.query.float() * a.query_dequant_scale.float()[..., None]
    key = a.key.float() * a.key_dequant_scale.float()[..., None]
    positions, values = choose_row_by_row(
        real_rows(s, a.sparse_mode),
        query.reshape(s.tokens, *query.shape[-2:]),
        a.weights.reshape(s.tokens, -1).float(),
        [request_keys(s, key, request) for request in range(s.batch)],
        a.sparse_count,
    )
    return shaped_choice(a.query, positions, values, dtype=torch.float32, values_wanted=False)[0]


def run_cpu(a: Args) -> torch.Tensor:
    """The best keys of all rows in tiles; keys are dequantised as they are read."""
    s = a.sequences
    rows, keys = s.query_rows(), s.key_rows()

    def read(request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        quantised = keys.read(a.key.view(torch.uint8), request, position).view(a.key.dtype)
        scale = keys.read(a.key_dequant_scale[..., None], request, position)
        return quantised.float() * scale.float()

    scoring = KeyScoring(
        query=a.query.reshape(s.tokens, *a.query.shape[-2:]),
        weights=a.weights.reshape(s.tokens, -1),
        rows=rows,
        keys=keys,
        seen=visible_keys(rows, keys, causal=a.sparse_mode == 3),
        read=read,
        count=a.sparse_count,
        query_scale=a.query_dequant_scale.reshape(s.tokens, -1),
    )
    positions, values = best_keys(scoring)
    return shaped_choice(a.query, positions, values, dtype=torch.float32, values_wanted=False)[0]


def torch_npu_call(a: Args) -> NpuCall:
    """Seven positional arguments, what differs from its default by name."""
    return call_like_record("npu_quant_lightning_indexer", a)

"""mla_prolog: projections, norms, rotary parts and cache writes of latent attention, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..abi import NOT_EMULATED, AclnnError
from ..contracts import contract_check
from ..dispatch import kernel
from .rotary import normalised, rotated, rounded_int8, write_row

Scale = torch.Tensor | None


def _v3_names(a: Any) -> Mapping[str, Any]:
    return {**vars(a), "query_norm_flag": a.query_norm is not None}


@kernel(
    "aclnnMlaPrologV3WeightNz", check=contract_check("mla_prolog_v3", _v3_names), workspace=4096
)
def mla_prolog_v3(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Shapes in :class:`ascend_attn_ops.MlaPrologV3Arguments`."""
    for name, modes, value in (
        ("weight_quant_mode", (0, 1, 2), a.weight_quant_mode),
        ("kv_cache_quant_mode", (0, 1, 2), a.kv_cache_quant_mode),
    ):
        if value not in modes:
            raise AclnnError(NOT_EMULATED, f"{name}: {value} is not emulated, only {modes}")
    if a.cache_mode.startswith("PA_BLK"):
        raise AclnnError(NOT_EMULATED, f"cache_mode: {a.cache_mode} is not emulated")
    return _prolog(a, a.weight_quant_mode > 0, bool(a.query_quant_mode), a.qc_qr_scale, a.kc_scale)


@kernel("aclnnMlaPrologV2WeightNz", check=contract_check("mla_prolog_v2"), workspace=4096)
def mla_prolog_v2(a: Any) -> tuple[torch.Tensor | None, ...]:
    """The quantisation follows from the dtypes."""
    quantised = a.weight_uq_qr.dtype == torch.int8
    return _prolog(a, quantised, a.query.dtype == torch.int8, 1.0, 1.0)[:3]


def _prolog(
    a: Any, quantised: bool, query_quantised: bool, query_scale: float, latent_scale: float
) -> tuple[torch.Tensor | None, ...]:
    tokens = a.token_x.flatten(0, -2)
    cos, sin = a.rope_cos.flatten(0, -2), a.rope_sin.flatten(0, -2)
    _write_caches(a, tokens, cos, sin, latent_scale)
    low = _product(tokens, a.weight_dq, a.dequant_scale_x, a.dequant_scale_w_dq)
    low = normalised(low, a.rmsnorm_gamma_cq, a.rmsnorm_epsilon_cq)
    norm, norm_scale = low, None
    if quantised:
        smooth = low if a.smooth_scales_cq is None else low * a.smooth_scales_cq.double()
        norm, norm_scale = _per_row_int8(smooth)
    wide = _product(norm, a.weight_uq_qr, norm_scale, a.dequant_scale_w_uq_qr) * query_scale
    heads, size, _ = a.weight_uk.shape
    split = wide.view(len(tokens), heads, -1)
    query = torch.matmul(split[..., None, :size], a.weight_uk.double())[..., 0, :]
    rope = rotated(split[..., size:], cos[:, None], sin[:, None])
    row_scale: Scale = None
    if query_quantised:
        query, row_scale = _per_row_int8(query)
    return (
        query.view(a.query.shape),
        rope.view(a.query_rope.shape),
        _like(row_scale, a.dequant_scale_q_nope),
        _like(norm, getattr(a, "query_norm", None)),
        _like(norm_scale, getattr(a, "dequant_scale_q_norm", None)),
    )


def _like(value: Scale, target: Scale) -> Scale:
    """The value in the shape of an output that is there and takes it."""
    if value is None or target is None or value.numel() != target.numel():
        return None
    return value.view(target.shape)


def _product(x: torch.Tensor, weight: torch.Tensor, x_scale: Scale, w_scale: Scale) -> torch.Tensor:
    """``x @ weight``; scales belong to 8-bit weights."""
    result = x.double() @ weight.double()
    if weight.dtype != torch.int8:
        return result
    for scale in (x_scale, w_scale):
        result = result if scale is None else result * scale.double()
    return result


def _per_row_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scale of each row; the largest value of a row is 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / torch.where(scale == 0, 1.0, scale)).round(), scale


def _write_caches(
    a: Any, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, latent_scale: float
) -> None:
    both = _product(tokens, a.weight_dkv_kr, a.dequant_scale_x, a.dequant_scale_w_dkv_kr)
    size = a.rmsnorm_gamma_ckv.numel()
    latent = normalised(both[:, :size], a.rmsnorm_gamma_ckv, a.rmsnorm_epsilon_ckv) * latent_scale
    rope = rotated(both[:, size:], cos, sin)
    for cache, rows, scale in (
        (a.kv_cache, latent, a.quant_scale_ckv),
        (a.kr_cache, rope, a.quant_scale_ckr),
    ):
        stored = rows
        if scale is not None and cache.dtype == torch.int8:
            stored = rounded_int8(rows, scale.flatten())
        _write_rows(a, cache, stored)


def _write_rows(a: Any, cache: torch.Tensor, rows: torch.Tensor) -> None:
    if a.cache_index is None:
        cache.copy_(rows.view(cache.shape))
        return
    for slot, row in zip(a.cache_index.flatten().tolist(), rows, strict=True):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            write_row(cache, block, offset, row, a.cache_mode.endswith("NZ"))

"""The formula, in float32; version 2 of the operator shares it."""

from __future__ import annotations

import attrs
import torch

from .._shared.cache_rows import write_rows
from .._shared.rotary import rms_norm, rotate_interleaved_to_half
from .arguments import MlaPrologV3Arguments as Args

Scale = torch.Tensor | None


@attrs.frozen(eq=False)
class Prepared:
    """What the operator computes besides the caches; rows are tokens.

    Attributes:
        query: (T, N, Hckv), int8 when ``query_scale`` is given.
        query_rope: (T, N, Dr) float32.
        query_scale: (T, N, 1) float32 or None.
        query_norm: (T, Hcq), int8 when ``norm_scale`` is given.
        norm_scale: (T, 1) float32 or None.
    """

    query: torch.Tensor
    query_rope: torch.Tensor
    query_scale: Scale
    query_norm: torch.Tensor
    norm_scale: Scale


def host_gap(a: Args) -> str | None:
    """The modes that the documents do not define well enough, or that torch cannot express."""
    if a.weight_quant_mode > 2:
        return (
            f"weight_quant_mode {a.weight_quant_mode}: 8-bit floats are not implemented on the host"
        )
    if a.kv_cache_quant_mode == 3:
        return "kv_cache_quant_mode 3: the packed cache is not implemented on the host"
    if a.by_page:
        return f"cache_mode {a.cache_mode}: the order of its index is not documented (unverified)"
    return None


def run_reference(a: Args) -> tuple[torch.Tensor, ...]:
    """query, query_rope, dequant_scale_q_nope, query_norm, dequant_scale_q_norm."""
    done = prepare(a)
    query_norm = done.query_norm.to(a.weight_uq_qr.dtype)
    query_norm = query_norm.view(*a.lead, query_norm.shape[1])
    return (
        shaped(a, done.query),
        shaped(a, done.query_rope),
        torch.empty(0) if done.query_scale is None else done.query_scale,
        query_norm if a.query_norm_flag else query_norm.new_empty(0),
        torch.empty(0) if done.norm_scale is None or not a.query_norm_flag else done.norm_scale,
    )


def shaped(a: Args, rows: torch.Tensor) -> torch.Tensor:
    """Rows of tokens in the leading dimensions of token_x; int8 stays, floats become rope's."""
    dtype = rows.dtype if rows.dtype == torch.int8 else a.rope_sin.dtype
    return rows.to(dtype).contiguous().view(*a.lead, *rows.shape[1:])


def prepare(a: Args) -> Prepared:
    """Compute the query side and write the caches."""
    tokens = a.token_x.reshape(a.tokens, a.token_x.shape[-1])
    cos, sin = (
        table.float().reshape(a.tokens, table.shape[-1]) for table in (a.rope_cos, a.rope_sin)
    )
    _write_caches(a, tokens, cos, sin)
    low = project(tokens, a.weight_dq, a.dequant_scale_x, a.dequant_scale_w_dq)
    low = rms_norm(low, a.rmsnorm_gamma_cq.float(), a.rmsnorm_epsilon_cq)
    norm_scale: Scale = None
    if a.weight_quant_mode:
        smooth = 1.0 if a.smooth_scales_cq is None else a.smooth_scales_cq
        low, norm_scale = quantise(low * smooth)
    heads, size, _ = a.weight_uk.shape
    wide = project(low, a.weight_uq_qr, norm_scale, a.dequant_scale_w_uq_qr) * a.qc_qr_scale
    nope, rope = wide.view(a.tokens, heads, size + cos.shape[1]).split([size, cos.shape[1]], -1)
    query = torch.einsum("tnd,ndc->tnc", nope, a.weight_uk.float())
    query_scale: Scale = None
    if a.query_quant_mode:
        query, query_scale = quantise(query)
    query_rope = rotate_interleaved_to_half(rope, cos[:, None], sin[:, None])
    return Prepared(query, query_rope, query_scale, low, norm_scale)


def project(x: torch.Tensor, weight: torch.Tensor, x_scale: Scale, w_scale: Scale) -> torch.Tensor:
    """``x @ weight`` in float32; the sums of int8 products are exact, then scaled."""
    if weight.dtype != torch.int8:
        return x.float() @ weight.float()
    scaled = (x.double() @ weight.double()).float()
    for scale in (x_scale, w_scale):
        scaled = scaled if scale is None else scaled * scale
    return scaled


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and float32 scale per row: ``x = values * scale``, the largest being 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    values = (x / scale.masked_fill(scale == 0, 1.0)).round().to(torch.int8)
    return values, scale


def _write_caches(a: Args, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    both = project(tokens, a.weight_dkv_kr, a.dequant_scale_x, a.dequant_scale_w_dkv_kr)
    latent, rope = both.split([a.weight_uk.shape[2], cos.shape[1]], -1)
    latent = rms_norm(latent, a.rmsnorm_gamma_ckv.float(), a.rmsnorm_epsilon_ckv) * a.kc_scale
    rope = rotate_interleaved_to_half(rope, cos, sin)
    quantised = a.kv_cache_quant_mode
    _write(a, a.kv_cache, latent, a.quant_scale_ckv if quantised else None)
    _write(a, a.kr_cache, rope, a.quant_scale_ckr if quantised == 2 else None)


def _write(a: Args, cache: torch.Tensor, rows: torch.Tensor, scale: Scale) -> None:
    if scale is not None:
        rows = (rows * scale.reshape(1, -1)).round().clamp(-128, 127)
    if a.cache_index is not None:
        write_rows(cache, rows, a.cache_index.flatten(), nz=a.is_nz)
    else:
        cache.copy_(rows.view(cache.shape))

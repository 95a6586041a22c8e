"""Rotary embeddings and the fused steps of latent attention around them, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..abi import INVALID, NOT_EMULATED, AclnnError
from ..contracts import contract_check
from ..dispatch import kernel

_MODES = ("half", "interleave")


def _rotary_names(a: Any) -> Mapping[str, Any]:
    mode = _MODES[a.mode] if 0 <= a.mode < len(_MODES) else str(a.mode)
    names = {"input": a.x, "r1": a.cos, "r2": a.sin, "rotary_mode": mode}
    return {**names, "rotate": getattr(a, "rotate", None)}


@kernel(
    "aclnnRotaryPositionEmbedding",
    "aclnnRotaryPositionEmbeddingV2",
    check=contract_check("rotary_position_embedding", _rotary_names),
)
def rotary_position_embedding(a: Any) -> torch.Tensor:
    """``x * cos + turned(x) * sin``; a given matrix ``rotate`` turns instead of the mode."""
    x = a.x.double()
    if getattr(a, "rotate", None) is not None:
        turned = x @ a.rotate.double()
    elif a.mode == 0:
        turned = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    return torch.addcmul(x.mul(a.cos.double()), turned, a.sin.double())


@kernel("aclnnInterleaveRope", check=contract_check("interleave_rope"))
def interleave_rope(a: Any) -> torch.Tensor:
    """Pairs (2i, 2i + 1) in, halves out."""
    return rotated(a.x, a.cos, a.sin)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs to half order, float64, by complex multiplication.

    With cos and sin of a position repeated in both halves this is the rotation of the pair; the
    two halves are multiplied by their own cos and sin.
    """
    even, odd = x.double()[..., 0::2], x.double()[..., 1::2]
    half = even.shape[-1]
    first = even * cos.double()[..., :half] - odd * sin.double()[..., :half]
    second = odd * cos.double()[..., half:] + even * sin.double()[..., half:]
    return torch.cat([first, second], -1)


def normalised(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm over the last dimension, float64."""
    wide = x.double()
    return gamma.double() * wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()


def rounded_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``round(x * scale)`` to the nearest even, saturated."""
    return (x * scale.double()).round().clamp(-128, 127)


def write_row(cache: torch.Tensor, block: int, offset: int, row: torch.Tensor, nz: bool) -> None:
    """One token into a cache (nb, bs, 1, D), in NZ order (D / L, bs, L) within the block or not."""
    if not nz:
        cache[block, offset, 0] = row.to(cache.dtype)
        return
    width = 32 // cache.dtype.itemsize
    size = cache.shape[1]
    pieces = cache[block].reshape(-1, size, width) if cache[block].is_contiguous() else None
    if pieces is None:
        raise AclnnError(INVALID, "an NZ cache must be contiguous")
    pieces[:, offset] = row.to(cache.dtype).view(-1, width)


def _kv_names(a: Any) -> Mapping[str, Any]:
    return {**vars(a), "c_kv_scale": a.ckv_scale, "c_kv_offset": a.ckv_offset}


@kernel(
    "aclnnKvRmsNormRopeCache",
    "aclnnKvRmsNormRopeCacheV2",
    check=contract_check("kv_rmsnorm_rope_cache", _kv_names),
)
def kv_rmsnorm_rope_cache(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Both caches in place; what was written is returned in the paged modes where asked for."""
    if getattr(a, "v", None) is not None:
        raise AclnnError(NOT_EMULATED, "v: what is normalised then is not documented; not emulated")
    size = len(a.gamma)
    latent = normalised(a.kv[..., :size], a.gamma, a.epsilon)
    rope = rotated(a.kv[..., size:], a.cos, a.sin)
    for cache, rows, scale in (
        (a.k_cache, rope, a.k_rope_scale),
        (a.ckv_cache, latent, a.ckv_scale),
    ):
        _write_tokens(a, cache, rows if scale is None else rounded_int8(rows, scale))
    given = a.is_output_kv and a.cache_mode != "Norm"
    return (rope, latent) if given else (None, None)


def _write_tokens(a: Any, cache: torch.Tensor, rows: torch.Tensor) -> None:
    batch, _, tokens, _ = rows.shape
    index = a.index.view(batch, -1).tolist()
    for b in range(batch):
        for s in range(tokens):
            if a.cache_mode == "Norm":
                if index[b][s] >= 0:
                    cache[b, 0, index[b][s]] = rows[b, 0, s].to(cache.dtype)
                continue
            size = cache.shape[1]
            page, rest = divmod(s, size) if "BLK" in a.cache_mode else (s, 0)
            start = index[b][page]
            if start >= 0:
                block, offset = divmod(start + rest, size)
                write_row(cache, block, offset, rows[b, 0, s], a.cache_mode.endswith("NZ"))

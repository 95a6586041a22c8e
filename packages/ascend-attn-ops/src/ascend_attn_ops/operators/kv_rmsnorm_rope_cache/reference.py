"""The formula, in float32; version 2 of the operator shares it."""

from __future__ import annotations

import torch

from .._shared.cache_rows import write_rows
from .._shared.rotary import rms_norm, rotate_interleaved_to_half
from .arguments import KvRmsnormRopeCacheArguments as Args


def host_gap(a: Args) -> str | None:
    """The variant whose formula no document gives."""
    if a.v is not None:
        return "v: what is normalised when the values come apart is not documented (unverified)"
    return None


def run_reference(a: Args) -> tuple[torch.Tensor, ...]:
    """k_cache, ckv_cache, k_embed_out, y_out; see the argument record."""
    return a.k_cache, a.ckv_cache, *update_caches(a)


def update_caches(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Write both caches; returns k_embed_out and y_out."""
    latent, rope = a.kv.float().split([a.latent_size, a.rope_size], -1)
    latent = rms_norm(latent, a.gamma.float(), a.epsilon)
    rope = rotate_interleaved_to_half(rope, a.cos.float(), a.sin.float())
    slots = token_slots(a)
    _write(a, a.k_cache, rope, a.k_rope_scale, slots)
    _write(a, a.ckv_cache, latent, a.c_kv_scale, slots)
    k_embed, y = rope.to(a.kv.dtype), latent.to(a.kv.dtype)
    if a.is_output_kv and a.is_paged:
        return k_embed, y
    return torch.zeros_like(k_embed), torch.zeros_like(y)


def token_slots(a: Args) -> torch.Tensor:
    """(B * S,) int64 cache position of each token, block_size positions per block; -1 = skip."""
    batch, _, tokens, _ = a.kv.shape
    if a.by_page:
        token = torch.arange(tokens)
        start = a.index.view(batch, -1)[:, token // a.block_size]
        return (start + token % a.block_size).masked_fill(start < 0, -1).flatten()
    if a.is_paged:
        return a.index
    first = torch.arange(batch)[:, None] * a.block_size
    return (a.index + first).masked_fill(a.index < 0, -1).flatten()


def _write(
    a: Args,
    cache: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    if scale is not None:
        rows = (rows * scale).round().clamp(-128, 127)
    flat = rows.flatten(0, 2)
    if a.is_paged:
        write_rows(cache, flat, slots, nz=a.is_nz)
        return
    kept = slots >= 0
    block, offset = slots[kept] // a.block_size, slots[kept] % a.block_size
    cache[block, 0, offset] = flat.to(cache.dtype)[kept]

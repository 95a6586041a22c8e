"""Implementations of scatter_pa_kv_cache."""

from __future__ import annotations

import torch

from ...operator import NpuCall
from .arguments import ScatterPaKvCacheArguments as Args


def gap(a: Args) -> str | None:
    """The compressing scenario: its averaging is not documented exactly."""
    if a.key.dim() == 4:
        return "rank-4 keys: the documents do not define the compressed part exactly (unverified)"
    return None


def run_reference(a: Args) -> None:
    """The formula token by token; shapes and rules in the argument record."""
    for cache, rows in ((a.key_cache, a.key), (a.value_cache, a.value)):
        for token, slot in enumerate(a.slot_mapping.tolist()):
            if slot < 0:
                continue
            block, offset = divmod(slot, a.block_size)
            if a.is_nz:
                _write_nz(cache, rows[token], block, offset)
            else:
                cache[block, offset] = rows[token]


def _write_nz(cache: torch.Tensor, row: torch.Tensor, block: int, offset: int) -> None:
    flat = row.reshape(-1)
    pieces, inner = cache.shape[1], cache.shape[3]
    padded = torch.zeros(pieces * inner, dtype=flat.dtype)
    padded[: flat.numel()] = flat
    cache[block, :, offset] = padded.view(pieces, inner)


def run_cpu(a: Args) -> None:
    """All tokens at once; indices are 64-bit whatever the dtype of the slots."""
    slots = a.slot_mapping.long()
    keep = slots >= 0
    whole = bool(keep.all())
    if not whole:
        slots = slots[keep]
    block, offset = slots // a.block_size, slots % a.block_size
    for cache, rows in ((a.key_cache, a.key), (a.value_cache, a.value)):
        new = rows if whole else rows[keep]
        if not a.is_nz:
            cache.index_put_((block, offset), new)
            continue
        pieces, inner = cache.shape[1], cache.shape[3]
        flat = new.flatten(1)
        flat = torch.nn.functional.pad(flat, (0, pieces * inner - flat.shape[1]))
        cache.transpose(1, 2).index_put_((block, offset), flat.view(-1, pieces, inner))


def torch_npu_call(a: Args) -> NpuCall:
    """The vendor call: the mode is always named, because the schema's default is PA_NZ."""
    kwargs = {
        "compress_lens": a.compress_lens,
        "compress_seq_offsets": a.compress_seq_offsets,
        "seq_lens": a.seq_lens,
        "cache_mode": a.cache_mode or "Norm",
    }
    positional = (a.key, a.value, a.key_cache, a.value_cache, a.slot_mapping)
    return NpuCall("npu_scatter_pa_kv_cache", positional, kwargs)

"""Implementations of scatter_pa_kv_cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...operator import NpuCall
from .arguments import ScatterPaKvCacheArguments as Args
from .compiled_write import CompiledWrite, writes


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
    (write if not a.is_nz else _write_pieces)(
        a.key, a.value, a.key_cache, a.value_cache, a.slot_mapping
    )


def prepare_cpu(a: Args) -> Callable[..., None] | None:
    """What writes further tokens into caches of the same shape."""
    if writes(a):
        return CompiledWrite.of(a).run
    return None if a.is_nz else write


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write keys and values to the blocks of ``Norm`` caches; shapes as in the argument record."""
    keep, slots = _kept(slot_mapping)
    caches = (key_cache, value_cache)
    regular = all(cache.stride(0) == cache.shape[1] * cache.stride(1) for cache in caches)
    place = (slots,) if regular else _places(slots, key_cache.shape[1])
    for cache, rows in zip(caches, (key, value), strict=True):
        places = _by_slot(cache) if regular else cache
        places.index_put_(place, rows if keep is None else rows[keep])


def _by_slot(cache: torch.Tensor) -> torch.Tensor:
    """(num_blocks * block_size, N, D) of a cache whose blocks follow each other in memory."""
    blocks, size, *rest = cache.shape
    return cache.as_strided((blocks * size, *rest), cache.stride()[1:], cache.storage_offset())


def _write_pieces(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Likewise for caches in ``PA_NZ`` mode."""
    keep, slots = _kept(slot_mapping)
    place = _places(slots, key_cache.shape[2])
    for cache, rows in ((key_cache, key), (value_cache, value)):
        pieces, inner = cache.shape[1], cache.shape[3]
        flat = (rows if keep is None else rows[keep]).flatten(1)
        flat = torch.nn.functional.pad(flat, (0, pieces * inner - flat.shape[1]))
        cache.transpose(1, 2).index_put_(place, flat.view(-1, pieces, inner))


def _kept(slot_mapping: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which tokens have a slot (None: all of them), and their slots."""
    slots = slot_mapping.long()
    if slots.numel() == 0 or int(slots.min()) >= 0:
        return None, slots
    keep = slots >= 0
    return keep, slots[keep]


def _places(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, and offsets in them."""
    return slots // block_size, slots % block_size


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

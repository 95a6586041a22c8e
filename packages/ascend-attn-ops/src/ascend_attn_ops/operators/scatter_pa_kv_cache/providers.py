"""Implementations of scatter_pa_kv_cache."""

from __future__ import annotations

from collections.abc import Callable

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
    (write if not a.is_nz else _write_pieces)(
        a.key, a.value, a.key_cache, a.value_cache, a.slot_mapping
    )


def prepare_cpu(a: Args) -> Callable[..., None] | None:
    """What writes further tokens into caches of the same shape."""
    return None if a.is_nz else write


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write keys and values to the blocks of ``Norm`` caches; shapes as in the argument record."""
    keep, place = _places(slot_mapping, key_cache.shape[1])
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.index_put_(place, rows if keep is None else rows[keep])


def _write_pieces(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Likewise for caches in ``PA_NZ`` mode."""
    keep, place = _places(slot_mapping, key_cache.shape[2])
    for cache, rows in ((key_cache, key), (value_cache, value)):
        pieces, inner = cache.shape[1], cache.shape[3]
        flat = (rows if keep is None else rows[keep]).flatten(1)
        flat = torch.nn.functional.pad(flat, (0, pieces * inner - flat.shape[1]))
        cache.transpose(1, 2).index_put_(place, flat.view(-1, pieces, inner))


def _places(
    slot_mapping: torch.Tensor, block_size: int
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor]]:
    """Which tokens have a slot (None: all of them), and their blocks and offsets."""
    slots = slot_mapping.long()
    keep = None if slots.numel() == 0 or int(slots.min()) >= 0 else slots >= 0
    if keep is not None:
        slots = slots[keep]
    return keep, (slots // block_size, slots % block_size)


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

"""Fast host provider: only the selected rows are read and dequantised."""

from __future__ import annotations

import torch

from .._shared.selected_attention import SelectedAttention, attend
from .._shared.sequences import KeyRows
from .arguments import KvQuantSparseFlashAttentionArguments as Args
from .packing import LATENT, unpack


def run_cpu(a: Args) -> torch.Tensor:
    """Attention of all rows in tiles; see the argument record."""
    s = a.sequences
    keys = s.key_rows()
    result = attend(
        SelectedAttention(
            query=a.query.reshape(s.tokens, *a.query.shape[-2:]),
            indices=a.sparse_indices.reshape(s.tokens, -1),
            rows=s.query_rows(),
            keys=keys,
            gather=_Reader(a, keys),
            value_size=LATENT,
            scale=a.scale_value,
            block=a.sparse_block_size,
            causal=a.sparse_mode == 3,
        )
    )
    return result.out.view(*a.query.shape[:-1], LATENT)


class _Reader:
    """Reads packed rows as bytes and dequantises them."""

    def __init__(self, a: Args, keys: KeyRows) -> None:
        self._args = a
        self._keys = keys

    def __call__(
        self, request: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a = self._args
        key = torch.cat(self._unpacked(a.key, request, position), -1).float()
        if a.value.data_ptr() == a.key.data_ptr() and a.value.stride() == a.key.stride():
            return key, key[..., :LATENT]
        value, _ = self._unpacked(a.value, request, position)
        return key, value.float()

    def _unpacked(
        self, store: torch.Tensor, request: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._keys.read(store.view(torch.uint8), request, position)
        return unpack(rows.view(store.dtype), self._args.query.dtype)

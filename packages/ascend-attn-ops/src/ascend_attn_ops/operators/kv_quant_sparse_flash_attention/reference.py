"""The formula row by row in float32, over dequantised keys."""

from __future__ import annotations

import torch

from .._shared.reference_rows import request_keys
from ..sparse_flash_attention.reference import attend_rows
from .arguments import KvQuantSparseFlashAttentionArguments as Args
from .packing import LATENT, unpack


def run_reference(a: Args) -> torch.Tensor:
    """Attention of every row over its selected keys; see the argument record."""
    s = a.sequences

    def read(request: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = torch.cat(unpack(request_keys(s, a.key, request), a.query.dtype), -1)
        value, _ = unpack(request_keys(s, a.value, request), a.query.dtype)
        return key, value

    out, _, _ = attend_rows(
        s, a.query, read, indices=a.sparse_indices, scale=a.scale_value,
        block=a.sparse_block_size, sparse_mode=a.sparse_mode,
    )  # fmt: skip
    return out.view(*a.query.shape[:-1], LATENT).to(a.query.dtype)

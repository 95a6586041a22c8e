"""Layers of a decode step over a paged cache, for the attention operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_attn_ops.operators._shared.fused_infer import compiled_decode
from ascend_attn_ops.operators.scatter_pa_kv_cache import compiled_write

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 64, 128
LENGTHS = (1, 128, 129, 40, 300)
"""Within a block, one block, more than one; two of these have scores of their own width."""
LATENT, ROPE = 512, 64


def table(lengths: tuple[int, ...]) -> torch.Tensor:
    """Shuffled blocks; entries that no length reads are no blocks at all."""
    columns = -(-max(lengths) // BLOCK)
    ids = torch.randperm(len(lengths) * columns).view(len(lengths), columns)
    used = torch.tensor([-(-length // BLOCK) for length in lengths])
    return ids.where(torch.arange(columns) < used[:, None], 9999).int()


def arguments(lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> dict[str, Any]:
    """What layers of a decode step share."""
    return {
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1),
        "actual_seq_lengths": tuple(range(1, len(lengths) + 1)),
        "actual_seq_lengths_kv": lengths,
        "block_table": table(lengths),
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "scale": 0.1,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": BLOCK,
        **changes,
    }


def layer(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Tensors of one layer: keys and values side by side, as vLLM stores them."""
    blocks = len(lengths) * -(-max(lengths) // BLOCK)
    cache = torch.randn(blocks, KV_HEADS, BLOCK, 2 * SIZE)
    query = torch.randn(len(lengths), HEADS, SIZE)
    return {"query": query, "key": cache[..., :SIZE], "value": cache[..., SIZE:]}


def latent_layer(lengths: tuple[int, ...], *, joined: bool) -> dict[str, torch.Tensor]:
    """Tensors of one latent layer; both parts of a key in one row, or in caches of their own."""
    blocks = len(lengths) * -(-max(lengths) // BLOCK)
    rows = torch.randn(blocks, 1, BLOCK, LATENT + ROPE)
    latent, rope = rows[..., :LATENT], rows[..., LATENT:]
    if not joined:
        latent, rope = latent.contiguous(), rope.contiguous()
    query, query_rope = torch.randn(len(lengths), HEADS, LATENT + ROPE).split([LATENT, ROPE], -1)
    return {"query": query.contiguous(), "key": latent, "value": latent,
            "query_rope": query_rope.contiguous(), "key_rope": rope}  # fmt: skip


def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where numba is not installed."""
    for module in (compiled_decode, compiled_write):
        monkeypatch.setattr(module, "_loop", lambda: None)

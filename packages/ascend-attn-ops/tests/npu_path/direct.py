"""sparse_flash_attention as a direct aclnn call, and its answer by a float64 formula."""

from __future__ import annotations

from typing import Any

import torch
from sparse_oracle import sparse_attention

from ascend_attn_ops.providers.aclnn import DeviceTensor, Runtime

OPERATOR = "aclnnSparseFlashAttention"
QUERY_LENS, KEY_LENS, BLOCK, HEADS, SCALE = (3, 1), (40, 23), 16, 4, 0.0417
UNLIMITED = 2**63 - 1


def host_inputs(seed: int = 5) -> dict[str, torch.Tensor]:
    """Two requests over keys in blocks of 16, TND queries."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(QUERY_LENS)
    indices = torch.full((rows, 1, 20), -1, dtype=torch.int32)
    for row in range(rows):
        indices[row, 0, :17] = torch.randperm(20, generator=g)[:17].int()
    return {
        "query": torch.randn(rows, HEADS, 512, generator=g).bfloat16(),
        "key": torch.randn(7, BLOCK, 1, 512, generator=g).bfloat16(),
        "sparse_indices": indices,
        "block_table": torch.tensor([[4, 1, 6], [2, 5, 0]], dtype=torch.int32),
        "actual_seq_lengths_query": torch.tensor([3, 4], dtype=torch.int32),
        "actual_seq_lengths_kv": torch.tensor(KEY_LENS, dtype=torch.int32),
        "query_rope": torch.randn(rows, HEADS, 64, generator=g).bfloat16(),
        "key_rope": torch.randn(7, BLOCK, 1, 64, generator=g).bfloat16(),
    }


def expected(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 [T, N, 512], row by row and head by head."""
    parts, start = [], 0
    for request, (q_len, kv_len) in enumerate(zip(QUERY_LENS, KEY_LENS, strict=True)):
        rows = slice(start, start + q_len)
        blocks = inputs["block_table"][request].tolist()
        latent = inputs["key"][blocks].flatten(0, 1)[:kv_len, 0]
        rope = inputs["key_rope"][blocks].flatten(0, 1)[:kv_len, 0]
        parts.append(
            sparse_attention(
                torch.cat([inputs["query"][rows], inputs["query_rope"][rows]], -1),
                torch.cat([latent, rope], -1),
                latent,
                inputs["sparse_indices"][rows, 0].tolist(),
                scale=SCALE, block=1, mode=3, sinks=None,
            )[0]
        )  # fmt: skip
        start += q_len
    return torch.cat(parts)


def arguments(runtime: Runtime, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The 21 arguments, tensors uploaded; the value is the key."""
    given: dict[str, Any] = {name: runtime.upload(tensor) for name, tensor in inputs.items()}
    return {
        **given,
        "value": given["key"],
        "scale_value": SCALE,
        "sparse_block_size": 1,
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 3,
        "pre_tokens": UNLIMITED,
        "next_tokens": UNLIMITED,
        "attention_mode": 2,
        "return_softmax_lse": False,
        "attention_out": runtime.empty(tuple(inputs["query"].shape), "bfloat16"),
        "softmax_max": runtime.empty((0,), "float32"),
        "softmax_sum": runtime.empty((0,), "float32"),
    }


def free(call: dict[str, Any]) -> None:
    """Give the device tensors of :func:`arguments` back."""
    for value in call.values():
        if isinstance(value, DeviceTensor):
            value.close()

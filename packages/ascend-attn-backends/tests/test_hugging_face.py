"""The standard backend inside Hugging Face's attention modules: same weights, same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_attn_backends import (
    AscendAttentionBackend,
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AttentionBatch,
)

pytest.importorskip("transformers", reason="the test extra installs transformers")

from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}
# Tokens that each step adds to each of three requests: prefill, chunks, decode, verification.
SCHEDULES = {
    "prefill at once": [[37, 5, 20]],
    "chunks": [[16, 5, 7], [16, 0, 7], [5, 0, 6]],
    "prefill then decode": [[35, 3, 18], [1, 1, 1], [1, 1, 1]],
    "prefill then verification": [[29, 1, 12], [4, 2, 4], [4, 2, 4]],
    "mixed": [[20, 0, 19], [16, 1, 1], [1, 4, 0]],
}


def qwen3(window: int | None) -> tuple[torch.nn.Module, Any, Any]:
    config = Qwen3Config(
        **SIZES,
        attn_implementation="eager",
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
    )
    module = modeling_qwen3.Qwen3Attention(config, layer_idx=0)
    return module, modeling_qwen3, modeling_qwen3.Qwen3RotaryEmbedding(config)


def llama(window: int | None) -> tuple[torch.nn.Module, Any, Any]:
    assert window is None
    config = LlamaConfig(**SIZES, attn_implementation="eager")
    module = modeling_llama.LlamaAttention(config, layer_idx=0)
    return module, modeling_llama, modeling_llama.LlamaRotaryEmbedding(config)


MODULES = {"qwen3": (qwen3, None), "qwen3 window 6": (qwen3, 6), "llama": (llama, None)}


def additive_mask(length: int, window: int | None) -> torch.Tensor:
    """Hugging Face's eager mask for a whole prompt: 0 where seen, the lowest float elsewhere."""
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (window or length))
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


class Ours:
    """The same module with our backend between its projections and its output projection."""

    def __init__(self, module: torch.nn.Module, family: Any, window: int | None) -> None:
        self.module, self.family = module, family
        shape = AscendAttentionBackend.cache_shape(16, 16, 2, 16)
        self.caches = [shape.allocate(torch.float32) for _ in range(2)]
        self.impl = AscendAttentionBackendImpl(8, 16, module.scaling, 2, window)
        self.builder = AscendAttentionMetadataBuilder(16)

    def step(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        query, key, value = self.project(hidden, rotary)
        metadata = self.builder.build(batch)
        self.impl.write_kv(key, value, *self.caches, metadata.slot_mapping)
        output = self.impl.forward(query, *self.caches, metadata, torch.empty_like(query))
        return self.module.o_proj(output.flatten(1))

    def project(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Projections, norms and rotary embedding of the module itself."""
        m = self.module
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, 16)) for proj in (m.q_proj, m.k_proj, m.v_proj)
        )
        if hasattr(m, "q_norm"):
            query, key = m.q_norm(query), m.k_norm(key)
        query, key = (x.transpose(0, 1)[None] for x in (query, key))
        query, key = self.family.apply_rotary_pos_emb(query, key, *rotary)
        return [query[0].transpose(0, 1), key[0].transpose(0, 1), value]


def theirs(module: Any, rotary: Any, hidden: torch.Tensor, window: int | None) -> torch.Tensor:
    positions = torch.arange(len(hidden))[None]
    return module(
        hidden[None],
        position_embeddings=rotary(hidden[None], positions),
        attention_mask=additive_mask(len(hidden), window),
    )[0][0]


def run_schedule(
    name: str, schedule: str, our_window_change: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(ours, theirs): outputs per request."""
    torch.manual_seed(0)
    make, window = MODULES[name]
    module, family, rotary = make(window)
    ours = Ours(module, family, window and window + our_window_change)
    totals = [sum(column) for column in zip(*SCHEDULES[schedule], strict=True)]
    hidden = [torch.randn(total, 64) for total in totals]
    table = torch.randperm(16)[:9].reshape(3, 3).int()
    done, parts = [0, 0, 0], [[], [], []]
    for chunk in SCHEDULES[schedule]:
        ends = [d + c for d, c in zip(done, chunk, strict=True)]
        tokens = torch.cat([h[d:e] for h, d, e in zip(hidden, done, ends, strict=True)])
        positions = torch.cat([torch.arange(d, e) for d, e in zip(done, ends, strict=True)])
        batch = AttentionBatch.from_lengths(chunk, ends, 16, block_table=table)
        out = ours.step(tokens, rotary(tokens[None], positions[None]), batch)
        for part, rows in zip(parts, out.split(chunk), strict=True):
            part.append(rows)
        done = ends
    expected = [theirs(module, rotary, h, window) for h in hidden]
    return [torch.cat(part) for part in parts], expected


@torch.no_grad()
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODULES)
def test_equals_the_eager_module(name: str, schedule: str) -> None:
    for ours, expected in zip(*run_schedule(name, schedule), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("change", [-1, 1])
def test_control_a_window_off_by_one_differs(change: int) -> None:
    ours, expected = run_schedule("qwen3 window 6", "chunks", our_window_change=change)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)

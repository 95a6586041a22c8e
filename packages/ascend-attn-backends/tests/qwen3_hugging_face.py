"""Qwen3 attention of Hugging Face, and the same weights around a backend with a paged cache."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attn_backends_support import UNWRITTEN
from sparse_hugging_face import HIDDEN, Family
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from ascend_attn_backends import AttentionBatch, IndexRope

HEADS, KV_HEADS, SIZE = 4, 2, 16


def qwen3() -> Family:
    """One layer with random weights, norms included."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        num_hidden_layers=1,
        vocab_size=32,
        attn_implementation="eager",
    )
    layer = modeling_qwen3.Qwen3Attention(config, layer_idx=0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
    turn = modeling_qwen3.apply_rotary_pos_emb
    rotary = modeling_qwen3.Qwen3RotaryEmbedding(config)
    return Family([layer], rotary, turn, IndexRope.HALF, ["attention"])


@attrs.define(eq=False, slots=False)
class PagedQwen3:
    """The projections of the module around a backend.

    With ``dtype`` other than float32 queries and cache are rounded to it, and the results before
    the output projection are what a step gives. The last three attributes are what negative
    controls break.
    """

    found: Family
    backend: Any
    block_size: int = 16
    num_blocks: int = 32
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = attrs.field(factory=dict)
    scale_change: float = 1.0
    causal: bool = True

    def __attrs_post_init__(self) -> None:
        shape = self.backend.cache_shape(self.num_blocks, self.block_size, KV_HEADS, SIZE)
        self.caches = [shape.allocate(self.dtype).fill_(UNWRITTEN) for _ in range(2)]
        self.builder = self.backend.builder_class(self.block_size)
        scale = self.found.layers[0].scaling * self.scale_change
        self.impl = self.backend.impl_class(HEADS, SIZE, scale, KV_HEADS, **self.options)

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """Outputs of the layer for the tokens of one step."""
        (layer,) = self.found.layers
        metadata = self.builder.build(attrs.evolve(batch, causal=self.causal))
        query, key, value = (rows.to(self.dtype) for rows in self.project(hidden, positions))
        self.impl.write_kv(key, value, *self.caches, metadata.slot_mapping)
        result = torch.full_like(query, torch.nan)
        assert self.impl.forward(query, *self.caches, metadata, result) is result
        if self.dtype != torch.float32:
            return [result.flatten(1)]
        return [layer.o_proj(result.flatten(1))]

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Projections, norms and rotary embedding of the module itself."""
        (layer,) = self.found.layers
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, SIZE))
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        turned = (rows.transpose(0, 1)[None] for rows in (layer.q_norm(query), layer.k_norm(key)))
        rotary = self.found.rotary(hidden[None], positions[None])
        query, key = (rows[0].transpose(0, 1) for rows in self.found.interleave(*turned, *rotary))
        return [query, key, value]

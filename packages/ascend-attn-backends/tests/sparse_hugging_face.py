"""GLM-5 and DeepSeek-V3.2 attention modules of Hugging Face, and the same weights around ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from ascend_attn_backends import (
    AscendSFABackend,
    AscendSFAImpl,
    AscendSFAIndexerImpl,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    IndexRope,
    TopKBuffer,
    index_groups,
    rotate_index_rows,
)

HIDDEN, HEADS, NOPE, VALUE, TOP_K = 48, 4, 16, 24, 12
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "num_hidden_layers": 2,
    "index_topk": TOP_K,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "vocab_size": 32,
    "attn_implementation": "eager",
}


@attrs.frozen(eq=False)
class Family:
    """Modules of one model family.

    Attributes:
        layers: Attention modules; the first chooses keys, a later one may share its choice.
        rotary: Its rotary embedding.
        interleave: Its rotation of the main attention.
        style: Rotation of its indexer.
        kinds: ``indexer_types`` of the layers.
    """

    layers: list[Any]
    rotary: Any
    interleave: Any
    style: IndexRope
    kinds: list[str]


def family(name: str) -> Family:
    """A family with random weights, norms included."""
    torch.manual_seed(0)
    if name == "glm_moe_dsa":
        kinds = ["full", "shared"]
        config = GlmMoeDsaConfig(**SIZES, indexer_types=kinds)
        layers = [glm.GlmMoeDsaAttention(config, layer) for layer in range(2)]
        rotary, turn = glm.GlmMoeDsaRotaryEmbedding(config), glm.apply_rotary_pos_emb_interleave
        found = Family(layers, rotary, turn, IndexRope.INTERLEAVED, kinds)
    else:
        config = DeepseekV32Config(**SIZES)
        layers = [v32.DeepseekV32Attention(config, 0)]
        rotary, turn = v32.DeepseekV32RotaryEmbedding(config), v32.apply_rotary_pos_emb_interleave
        found = Family(layers, rotary, turn, IndexRope.HALF, ["full"])
    with torch.no_grad():
        for layer in found.layers:
            for parameter_name, parameter in layer.named_parameters():
                if "norm" in parameter_name:
                    parameter.normal_(1.0, 0.2)
    return found


@torch.no_grad()
def theirs(found: Family, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Output of every layer for one whole sequence ``[length, HIDDEN]``."""
    length = len(hidden)
    positions = torch.arange(length)
    mask = torch.where(positions[:, None] >= positions, 0.0, torch.finfo(torch.float32).min)
    outputs, chosen = [], {}
    for layer in found.layers:
        result = layer(
            hidden[None],
            position_embeddings=found.rotary(hidden[None], positions[None]),
            attention_mask=mask[None, None],
            **chosen,
        )
        outputs.append(result[0][0])
        if len(found.layers) > 1:
            chosen = {"prev_topk_indices": result[2]}
    return outputs


@attrs.define(eq=False, slots=False)
class Ours:
    """The projections of the modules around our backends, with paged caches.

    The last five attributes are what negative controls break.
    """

    found: Family
    block_size: int
    num_blocks: int
    kernel_block_size: int | None = None
    style: IndexRope | None = None
    top_k: int = TOP_K
    scale_change: float = 1.0
    causal: bool = True
    forget_choice: bool = False

    def __attrs_post_init__(self) -> None:
        shape = AscendSFABackend.cache_shape(self.num_blocks, self.block_size)
        kinds = (shape.latent, shape.rope, shape.index)
        self.caches = [
            [kind.allocate(torch.float32).fill_(torch.nan) for kind in kinds]
            for _ in self.found.layers
        ]
        self.groups = index_groups(self.found.kinds)
        self.buffer = TopKBuffer(256, TOP_K + 4)
        self.indexer = AscendSFAIndexerImpl(16, self.top_k)
        sizes = (self.block_size,)
        more = {"kernel_block_size": self.kernel_block_size}
        self.builder = AscendSFAMetadataBuilder(*sizes, **more)
        self.index_builder = AscendSFAIndexerMetadataBuilder(*sizes, **more)

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """Outputs of every layer for the tokens of one step."""
        batch = attrs.evolve(batch, causal=self.causal)
        cos, sin = (part[0] for part in self.found.rotary(hidden[None], positions[None]))
        metadata, index_metadata = self.builder.build(batch), self.index_builder.build(batch)
        self.buffer.begin_step()
        outputs = []
        for number, layer in enumerate(self.found.layers):
            group = next(group for group in self.groups if number in group.layers)
            latent_cache, rope_cache, index_cache = self.caches[number]
            residual = layer.q_a_layernorm(layer.q_a_proj(hidden))
            if layer.indexer is not None:
                chosen = self.choose(
                    layer.indexer, hidden, residual, (cos, sin), index_cache, index_metadata
                )
                self.buffer.write(group, chosen)
            if self.forget_choice:
                self.buffer.indices.fill_(-1)
            indices = self.buffer.read(group, number, len(hidden))
            query, rotated, latent, key_rope = self.project(layer, hidden, residual, (cos, sin))
            impl = AscendSFAImpl(HEADS, layer.scaling * self.scale_change)
            impl.write_kv(latent, key_rope, latent_cache, rope_cache, metadata.slot_mapping)
            result = torch.full((len(hidden), HEADS, 512), torch.nan)
            impl.forward(query, rotated, latent_cache, rope_cache, indices, metadata, result)
            value_up = self.up_projection(layer)[:, NOPE:]
            values = torch.einsum("tnl,nvl->tnv", result, value_up)
            outputs.append(layer.o_proj(values.flatten(1)))
        return outputs

    def choose(
        self,
        module: Any,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        style = self.style or self.found.style
        query = module.wq_b(residual).unflatten(-1, (16, 128))
        key = module.k_norm(module.wk(hidden))[:, None]
        query, key = (rotate_index_rows(rows, *rotary, style) for rows in (query, key))
        self.indexer.write_kv(key[:, 0], cache, metadata.slot_mapping)
        weights = self.indexer.scaled_weights(module.weights_proj(hidden))
        return self.indexer.forward(query, weights, cache, metadata)

    def project(
        self,
        layer: Any,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Absorbed queries, rotated queries, latents and rotated keys."""
        query = layer.q_b_proj(residual).unflatten(-1, (HEADS, NOPE + 64))
        plain, rotated = query.split([NOPE, 64], -1)
        latent, key_rope = layer.kv_a_proj_with_mqa(hidden).split([512, 64], -1)
        rotated, key_rope = self.found.interleave(
            rotated.transpose(0, 1)[None], key_rope[None, None], *(part[None] for part in rotary)
        )
        key_up = self.up_projection(layer)[:, :NOPE]
        absorbed = torch.einsum("tnd,ndl->tnl", plain, key_up)
        return absorbed, rotated[0].transpose(0, 1), layer.kv_a_layernorm(latent), key_rope[0, 0]

    @staticmethod
    def up_projection(layer: Any) -> torch.Tensor:
        """``[N, nope + value, 512]``."""
        return layer.kv_b_proj.weight.view(HEADS, NOPE + VALUE, 512)


Chunk = tuple[int, int]
"""Tokens of a request in one step: kept ones, and drafts that are rejected afterwards."""


def run(
    ours: Any,
    schedule: Sequence[Sequence[Chunk]],
    seed: int = 0,
    expected_of: Callable[[Family, torch.Tensor], list[torch.Tensor]] = theirs,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(ours, theirs): per layer, the outputs of all kept tokens of all requests.

    ``ours`` is anything with ``found``, ``block_size``, ``num_blocks`` and ``step``.
    """
    generator = torch.Generator().manual_seed(seed)
    requests = len(schedule[0])
    totals = [sum(step[row][0] for step in schedule) for row in range(requests)]
    hidden = [torch.randn(total, HIDDEN, generator=generator) for total in totals]
    longest = max(t + max(step[r][1] for step in schedule) for r, t in enumerate(totals))
    width = max(-(-longest // ours.block_size), 1)
    table = torch.randperm(ours.num_blocks, generator=generator)[: requests * width]
    table = table.view(requests, width).int()
    done = [0] * requests
    parts: list[list[list[torch.Tensor]]] = [
        [[] for _ in range(requests)] for _ in ours.found.kinds
    ]
    for step in schedule:
        lengths = [kept + rejected for kept, rejected in step]
        if not any(lengths):
            continue
        tokens = []
        for row, (kept, rejected) in enumerate(step):
            tokens.append(hidden[row][done[row] : done[row] + kept])
            tokens.append(torch.randn(rejected, HIDDEN, generator=generator))
        ends = [d + n for d, n in zip(done, lengths, strict=True)]
        batch = AttentionBatch.from_lengths(lengths, ends, ours.block_size, block_table=table)
        positions = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, lengths, strict=True)])
        for layer, output in enumerate(ours.step(torch.cat(tokens), positions, batch)):
            for row, rows in enumerate(output.split(lengths)):
                parts[layer][row].append(rows[: step[row][0]])
        done = [d + kept for d, (kept, _) in zip(done, step, strict=True)]
    expected = [expected_of(ours.found, rows) if len(rows) else [] for rows in hidden]
    found = [torch.cat([torch.cat(rows) for rows in layer if rows]) for layer in parts]
    wanted = [
        torch.cat([outputs[layer] for outputs in expected if outputs])
        for layer in range(len(ours.found.kinds))
    ]
    return found, wanted

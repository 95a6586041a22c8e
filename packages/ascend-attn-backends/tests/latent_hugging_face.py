"""DeepSeek-V3 attention of Hugging Face, and the same weights around our latent backend."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attn_backends_support import UNWRITTEN
from sparse_hugging_face import HEADS, NOPE, SIZES, VALUE, Family
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from ascend_attn_backends import (
    AscendMLABackend,
    AscendMlaDCPImpl,
    AscendMlaDCPMetadataBuilder,
    AscendMLAImpl,
    AscendMLAMetadataBuilder,
    AttentionBatch,
    ContextShard,
    IndexRope,
    LatentRankStep,
    ThreadDCPGroup,
    run_ranks,
    sharded_batch,
)


def deepseek_v3() -> Family:
    """One layer with random weights, norms included."""
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if not name.startswith("index_")}
    config = DeepseekV3Config(**sizes)
    layer = v3.DeepseekV3Attention(config, 0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
    turn = v3.apply_rotary_pos_emb_interleave
    return Family(
        [layer], v3.DeepseekV3RotaryEmbedding(config), turn, IndexRope.INTERLEAVED, ["mla"]
    )


@attrs.frozen(eq=False)
class LatentRows:
    """What the projections of the module give for some tokens.

    Attributes:
        q_nope: ``[T, N, 512]`` absorbed queries.
        q_pe: ``[T, N, 64]`` rotated queries.
        latent: ``[T, 512]``.
        rope: ``[T, 64]``.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor


def projected(found: Family, hidden: torch.Tensor, positions: torch.Tensor) -> LatentRows:
    """The projections, norms and rotary embedding of the module itself, absorbed."""
    (layer,) = found.layers
    rotary = found.rotary(hidden[None], positions[None])
    query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
    plain, rotated = query.unflatten(-1, (HEADS, NOPE + 64)).split([NOPE, 64], -1)
    latent, key_rope = layer.kv_a_proj_with_mqa(hidden).split([512, 64], -1)
    rotated, key_rope = found.interleave(
        rotated.transpose(0, 1)[None], key_rope[None, None], *rotary
    )
    return LatentRows(
        torch.einsum("tnd,ndl->tnl", plain, up_projection(layer)[:, :NOPE]),
        rotated[0].transpose(0, 1),
        layer.kv_a_layernorm(latent),
        key_rope[0, 0],
    )


def up_projection(layer: Any) -> torch.Tensor:
    """``[N, nope + value, 512]``."""
    return layer.kv_b_proj.weight.view(HEADS, NOPE + VALUE, 512)


def leave(layer: Any, latents: torch.Tensor) -> torch.Tensor:
    """Output of the module for attention results ``[T, N, 512]``."""
    values = torch.einsum("tnl,nvl->tnv", latents, up_projection(layer)[:, NOPE:])
    return layer.o_proj(values.flatten(1))


@attrs.define(eq=False, slots=False)
class OursMLA:
    """The projections of the module around our backend, with paged caches.

    The last two attributes are what negative controls break.
    """

    found: Family
    block_size: int
    num_blocks: int
    combined_cache: bool = False
    partial: bool = False
    scale_change: float = 1.0
    causal: bool = True

    def __attrs_post_init__(self) -> None:
        shape = AscendMLABackend.cache_shape(self.num_blocks, self.block_size)
        if self.combined_cache:
            both = torch.full((self.num_blocks, 1, self.block_size, 576), UNWRITTEN)
            self.caches = both.split([512, 64], -1)
        else:
            kinds = (shape.latent, shape.rope)
            self.caches = tuple(kind.allocate(torch.float32).fill_(UNWRITTEN) for kind in kinds)
        self.builder = AscendMLAMetadataBuilder(self.block_size)
        self.impl = AscendMLAImpl(HEADS, self.found.layers[0].scaling * self.scale_change)

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """Outputs of the layer for the tokens of one step."""
        metadata = self.builder.build(attrs.evolve(batch, causal=self.causal))
        rows = projected(self.found, hidden, positions)
        self.impl.write_kv(rows.latent, rows.rope, *self.caches, metadata.slot_mapping)
        result = torch.full_like(rows.q_nope, torch.nan)
        arguments = (rows.q_nope, rows.q_pe, *self.caches, metadata)
        if self.partial:
            result = self.impl.forward_mqa_partial(*arguments).out
        else:
            assert self.impl.forward_mqa(*arguments, result) is result
        return [leave(self.found.layers[0], result)]


@attrs.define(eq=False, slots=False)
class OursMLAOnRanks:
    """The projections of the module around our backend on several ranks of one process.

    ``read_interleave`` is what a negative control breaks.
    """

    found: Family
    block_size: int
    num_blocks: int
    size: int
    interleave: int = 1
    read_interleave: int | None = None

    def __attrs_post_init__(self) -> None:
        shape = AscendMLABackend.cache_shape(self.num_blocks, self.block_size)
        kinds = (shape.latent, shape.rope)
        self.caches = [
            [kind.allocate(torch.float32).fill_(UNWRITTEN) for kind in kinds]
            for _ in range(self.size)
        ]
        self.impl = self.layer(None)

    def layer(self, group: ThreadDCPGroup | None) -> AscendMlaDCPImpl:
        return AscendMlaDCPImpl(HEADS // self.size, self.found.layers[0].scaling, group)

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """Outputs of the layer for the tokens of one step."""
        rows = projected(self.found, hidden, positions)
        steps = [self.rank_step(rank, rows, batch) for rank in range(self.size)]

        @torch.no_grad()
        def forward(group: ThreadDCPGroup) -> torch.Tensor:
            step = steps[group.rank]
            return self.layer(group).forward_mqa(step, torch.full_like(step.q_nope, torch.nan))

        return [leave(self.found.layers[0], torch.cat(run_ranks(self.size, forward), 1))]

    def rank_step(self, rank: int, rows: LatentRows, batch: AttentionBatch) -> LatentRankStep:
        """Write a rank's share of the new rows; what it brings to the step."""
        shard = ContextShard(rank=rank, size=self.size, interleave=self.interleave)
        own = sharded_batch(
            batch.query_start_loc.diff().tolist(),
            batch.seq_lens.tolist(),
            self.block_size,
            shard,
            block_table=batch.block_table,
        )
        read = attrs.evolve(shard, interleave=self.read_interleave or self.interleave)
        metadata = AscendMlaDCPMetadataBuilder(self.block_size, shard=read).build(own)
        caches = self.caches[rank]
        self.impl.write_kv(rows.latent, rows.rope, *caches, metadata.slot_mapping)
        heads = slice(rank * self.impl.num_heads, (rank + 1) * self.impl.num_heads)
        return LatentRankStep(
            q_nope=rows.q_nope[:, heads],
            q_pe=rows.q_pe[:, heads],
            latent=rows.latent,
            rope=rows.rope,
            latent_cache=caches[0],
            rope_cache=caches[1],
            metadata=metadata,
        )

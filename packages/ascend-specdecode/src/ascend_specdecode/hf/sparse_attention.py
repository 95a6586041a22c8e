"""Sparse latent attention (GLM-5) of Hugging Face models through ascend-attn-backends.

transformers' modules choose the keys of a token themselves, so a registered attention function
would get the choice too late: here ``forward`` of the attention modules is replaced. Their
projections, norms and rotation stay; the indexer's scores, the choice, the caches and the attention
are the backends'. Queries are absorbed: multiplied by the key half of the latent up-projection.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ascend_attn_backends import (
    AscendSFAImpl,
    AscendSFAIndexerImpl,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    IndexRope,
    rotate_index_rows,
)
from ascend_specdecode.hf.paged_cache import SparseCache

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, R] of the step's positions."""


@attrs.frozen(eq=False)
class SparseStep:
    """What the attention layers of one step share.

    Attributes:
        cache: where latents and keys live.
        metadata: of the attention.
        index_metadata: of the indexer.
    """

    cache: SparseCache
    metadata: Any
    index_metadata: Any

    @classmethod
    def of(cls, cache: SparseCache, batch: AttentionBatch) -> SparseStep:
        """The step of a batch; builds its metadata."""
        size = cache.block_size
        return cls(
            cache,
            AscendSFAMetadataBuilder(size).build(batch),
            AscendSFAIndexerMetadataBuilder(size).build(batch),
        )


class SparseAttention:
    """Stands in for ``forward`` of one attention module.

    Args:
        module: ``GlmMoeDsaAttention``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._impl = AscendSFAImpl(module.num_heads, module.scaling)
        self._indexer = None
        if module.indexer is not None:
            indexer = module.indexer
            self._indexer = AscendSFAIndexerImpl(indexer.n_heads, indexer.index_topk)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary,
        *,
        ascend_step: SparseStep,
        prev_topk_indices: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """Write the step's rows, choose keys, attend.

        Args:
            hidden_states: [1, T, H] of all sequences of the step, one after the other.
            position_embeddings: cosines and sines [1, T, R].
            ascend_step: the step.
            prev_topk_indices: the choice [T, 1, k] of the layer before, for one that shares it.

        Returns:
            [1, T, H], None, and the choice for the next layer.
        """
        hidden, rotary = hidden_states[0], (position_embeddings[0][0], position_embeddings[1][0])
        module, metadata = self._module, ascend_step.metadata
        latents, ropes, index = ascend_step.cache.layers[module.layer_idx]
        residual = module.q_a_layernorm(module.q_a_proj(hidden))
        chosen = prev_topk_indices
        if self._indexer is not None:
            chosen = self._choose(self._indexer, hidden, residual, rotary, index, ascend_step)
        query, rotated, latent, rope = self._project(hidden, residual, rotary)
        self._impl.write_kv(latent, rope, latents, ropes, metadata.slot_mapping)
        result = torch.empty_like(query)
        assert chosen is not None  # noqa: S101 - transformers makes the first layer choose
        self._impl.forward(query, rotated, latents, ropes, chosen, metadata, result)
        values = torch.einsum("tnl,nvl->tnv", result, self._up[:, module.qk_nope_head_dim :])
        return module.o_proj(values.flatten(1))[None], None, chosen

    @property
    def _up(self) -> torch.Tensor:
        """The latent up-projection, [N, nope + value, latent]."""
        module = self._module
        up: torch.Tensor = module.kv_b_proj.weight
        return up.view(module.num_heads, -1, module.kv_lora_rank)

    def _choose(
        self,
        indexer: AscendSFAIndexerImpl,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: Rotary,
        cache: torch.Tensor,
        step: SparseStep,
    ) -> torch.Tensor:
        module, metadata = self._module.indexer, step.index_metadata
        query = module.wq_b(residual).unflatten(-1, (module.n_heads, module.head_dim))
        key = module.k_norm(module.wk(hidden))[:, None]
        query, key = (
            rotate_index_rows(rows, *rotary, IndexRope.INTERLEAVED) for rows in (query, key)
        )
        indexer.write_kv(key[:, 0], cache, metadata.slot_mapping)
        weights = indexer.scaled_weights(module.weights_proj(hidden))
        return indexer.forward(query, weights, cache, metadata)

    def _project(
        self, hidden: torch.Tensor, residual: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, ...]:
        """Absorbed queries [T, N, L], rotated ones [T, N, R], latents [T, L], keys [T, R]."""
        from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

        glm: Any = modeling_glm_moe_dsa  # without types
        module = self._module
        sizes = [module.qk_nope_head_dim, module.qk_rope_head_dim]
        plain, rotated = module.q_b_proj(residual).unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        both = module.kv_a_proj_with_mqa(hidden)
        latent, rope = both.split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
        rotated, rope = glm.apply_rotary_pos_emb_interleave(
            rotated.transpose(0, 1)[None], rope[None, None], *(part[None] for part in rotary)
        )
        absorbed = torch.einsum("tnd,ndl->tnl", plain, self._up[:, : sizes[0]])
        return absorbed, rotated[0].transpose(0, 1), module.kv_a_layernorm(latent), rope[0, 0]

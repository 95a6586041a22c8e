"""What the adapters of latent attention share: vLLM's one cache, its metadata and its layer.

vLLM's MLA layer absorbs the queries, writes the cache through `do_kv_cache_update` and hands
tokens to `forward_mqa` (decode) or `forward_mha` (prefill). The backends of ascend-attn-backends
compute prefill, chunks, decode and verification of drafts in one absorbed call, so the metadata
here calls every token a decode and all of them come to `forward_mqa`. Under prefill context
parallelism vLLM must know which tokens each rank has alone; there the metadata tells prompts from
decodes, and the layer says that it has no path of its own for prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from vllm.v1.attention.backend import (
    AttentionType,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from ascend_attn_backends import AscendMLAImpl, AscendSFAImpl
from ascend_attn_backends import AttentionBackend as BackendClass
from ascend_attn_ops import PartialAttention
from ascend_vllm_plugin.adapters.backend import AdaptedBackend
from ascend_vllm_plugin.adapters.layer import SplitCache, layer_request, unknown_arguments
from ascend_vllm_plugin.adapters.shared_keys import SharedKeysFacts, padded, runner_refusals
from ascend_vllm_plugin.adapters.steps import StepMetadataBuilder
from ascend_vllm_plugin.environment import judged_profile
from ascend_vllm_plugin.errors import LayerRefusedError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer

Queries = tuple[torch.Tensor, torch.Tensor]
"""Absorbed [T, N, 512] and rotated [T, N, 64] queries."""

Caches = tuple[torch.Tensor, torch.Tensor]
"""Latent rows [num_blocks, 1, block_size, 512] and rotary rows [..., 64]."""


@attrs.frozen(eq=False, kw_only=True)
class LatentMetadata:
    """What vLLM's MLA layer reads of a step, around our own metadata.

    Attributes:
        step: metadata of ascend-attn-backends.
        num_actual_tokens: tokens of the step, padding included.
        num_decodes: requests that vLLM is to treat as decodes.
        num_decode_tokens: their tokens, which come first.
        num_prefills: the other requests.
        query_start_loc: [num_reqs + 1] int32, first token of each request.
        seq_lens: [num_reqs] int32, keys of each request.
        slot_mapping: cache slots of the tokens that this rank writes; under prefill context
            parallelism those of all ranks, one rank after the other.
        prefill: always None; there is no path of its own for prompts.
    """

    step: Any
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    prefill: None = None

    @property
    def decode(self) -> LatentMetadata:
        """Where vLLM looks for the lengths of decodes: here."""
        return self


class LatentBackend(AdaptedBackend):
    """What vLLM wants to know about a backend over latent rows."""

    @classmethod
    def is_mla(cls) -> bool:
        """Rows are latents, shared by all heads."""
        return True


class LatentMetadataBuilder(StepMetadataBuilder):
    """Translates a step, and tells vLLM's layer which tokens are decodes."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LatentMetadata:
        """Metadata of one step, built once and read by all layers."""
        common = common_attn_metadata
        decodes, decode_tokens = self._decodes(common)
        return LatentMetadata(
            step=self.build_step(self.batch_of(common)),
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_prefills=common.num_reqs - decodes,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
        )

    def _decodes(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """Requests that count as decodes, and their tokens.

        Under prefill context parallelism: the requests that every rank has whole. vLLM puts them
        first; how many tokens a request has says nothing about it.
        """
        prefilling = common.is_prefilling
        spread = self.vllm_config.parallel_config.prefill_context_parallel_size > 1
        if not spread or prefilling is None or not prefilling.any():
            return common.num_reqs, common.num_actual_tokens
        first = int(prefilling.int().argmax())
        return first, int(common.query_start_loc_cpu[first])


class LatentImpl(
    SplitCache,
    MLAAttentionImpl[LatentMetadata],  # type: ignore[type-var]  # vLLM never reads it
):
    """Translates the calls of an MLA layer.

    Attributes:
        backend: the backend of ascend-attn-backends that takes or refuses the layer.
        layer_class: what computes the layer.
        layer: that, for this layer.
        use_sparse: whether an indexer chooses the keys. `is_sparse` is vLLM's word for a layer
            without a path of its own for prompts.

    Raises:
        LayerRefusedError: the layer has something that the backend does not compute.
    """

    supports_dense_mha_prefill = False
    supports_pcp = False
    use_sparse: ClassVar[bool] = False
    backend: ClassVar[type[BackendClass]]
    layer_class: ClassVar[type[AscendMLAImpl] | type[AscendSFAImpl]]
    layer: AscendMLAImpl | AscendSFAImpl

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        sinks: torch.Tensor | None = None,
        **projections: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.latent_size, self.rope_size = kv_lora_rank, qk_rope_head_dim
        request = layer_request(
            use_mla=True,
            use_sparse=self.use_sparse,
            head_size=head_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            sliding_window=sliding_window,
            has_alibi=alibi_slopes is not None,
            logits_soft_cap=logits_soft_cap or None,
            attn_type=str(getattr(attn_type, "value", attn_type)),
            has_sinks=sinks is not None,
        )
        refusals = self.backend.refusals(request, judged_profile())
        further = {name: value for name, value in projections.items() if name not in _OF_VLLM}
        refusals += unknown_arguments(self.backend.name, kv_sharing_target_layer_name, further)
        refusals += runner_refusals(self.backend.name, request)
        if refusals:
            raise LayerRefusedError(self.backend.name, refusals)
        heads = num_heads * self.dcp_world_size  # vLLM gathers those of all ranks
        self.layer = self.layer_class(heads, scale, kv_lora_rank, qk_rope_head_dim)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write latent rows [T, 512] and rotary rows [T, 1, 64] to the slots [<= T] of the cache.

        Slots below 0 are skipped. A cache without elements belongs to a run that measures memory.
        """
        if kv_cache.numel():
            latent_cache, rope_cache = self.split_cache(kv_cache)
            rope = k_pe.view(k_pe.shape[0], self.rope_size)
            slots = slot_mapping if slot_mapping.dim() == 1 else slot_mapping.flatten()
            self.layer.write_kv(kv_c_normed, rope, latent_cache, rope_cache, slots)

    def forward_mqa(
        self,
        q: torch.Tensor | Queries,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of absorbed queries over the cache.

        Args:
            q: [T, N, 512] absorbed and [T, N, 64] rotated queries, or both joined.
            kv_c_and_k_pe_cache: [num_blocks, block_size, 576].
            attn_metadata: of this step.
            layer: unused.

        Returns:
            Latents [T, N, 512], 0 in rows of padding. Where ranks share keys, the part of this
            rank's keys and its natural-log lse [T, N], 0 and -inf where there are none; else None
            for the lse.
        """
        caches = self.split_cache(kv_c_and_k_pe_cache)
        return self.attend(self.split_query(q), caches, attn_metadata.step)

    def attend(
        self, queries: Queries, caches: Caches, step: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `forward_mqa`, with our metadata of the step."""
        raise NotImplementedError

    def views_of(self, kv_cache: torch.Tensor) -> Caches:
        """Views [num_blocks, 1, block_size, 512 and 64] of vLLM's [num_blocks, block_size, 576]."""
        rows = kv_cache[:, None]
        return rows[..., : self.latent_size], rows[..., self.latent_size :]

    def split_query(self, query: torch.Tensor | Queries) -> Queries:
        """Absorbed [T, N, 512] and rotated [T, N, 64] queries; vLLM may have joined them."""
        if isinstance(query, tuple):
            return query
        return query[..., : self.latent_size], query[..., self.latent_size :]


class SharedKeysImpl(SharedKeysFacts):
    """What a latent layer adds whose keys ranks share; mixed into a `LatentImpl`."""

    def attend_partial(self, queries: Queries, caches: Caches, step: Any) -> PartialAttention:
        """The heads of all ranks over this rank's keys, without rows of padding."""
        raise NotImplementedError

    def attend(
        self, queries: Queries, caches: Caches, step: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with rows of padding: 0 and -inf."""
        return padded(self.attend_partial(queries, caches, step), queries[0].shape[0])


_OF_VLLM = frozenset(
    {
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "kv_b_proj",
        "indexer",
        "index_group_builder",
    }
)
"""Arguments of an MLA layer that concern what vLLM computes around attention.

The last one shares, between layers, block addresses of chosen keys; our operators take positions.
"""

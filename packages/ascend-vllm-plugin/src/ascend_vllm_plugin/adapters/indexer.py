"""The indexer of sparse latent attention for vLLM: its metadata and its choice of keys.

vLLM has no hook for these; the modules of `ascend_vllm_plugin.patches` put them in their places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.ops.pcp import maybe_gather_indexer_k

from ascend_attn_backends import (
    AscendSFAIndexerBackend,
    AscendSFAIndexerDCPImpl,
    AscendSFAIndexerDCPMetadataBuilder,
    TorchDCPGroup,
)
from ascend_vllm_plugin.adapters.latent import (
    LatentBackend,
    LatentMetadata,
    LatentMetadataBuilder,
)
from ascend_vllm_plugin.adapters.layer import layer_request
from ascend_vllm_plugin.adapters.shared_keys import SharedKeysMetadataBuilder
from ascend_vllm_plugin.environment import judged_profile
from ascend_vllm_plugin.errors import LayerRefusedError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImplBase


class IndexerMetadataBuilder(SharedKeysMetadataBuilder, LatentMetadataBuilder):
    """Metadata over this rank's index rows."""

    step_builder = AscendSFAIndexerDCPMetadataBuilder


class IndexerBackend(LatentBackend):
    """What vLLM wants to know about the cache of index rows."""

    builder_class = IndexerMetadataBuilder

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImplBase[Any]]:
        """There is no attention over index rows."""
        raise NotImplementedError("the index cache has no attention layer of its own")

    @classmethod
    def supports_pcp(cls) -> bool:
        """The index rows of all ranks are gathered."""
        return True


class KeyChooser:
    """Chooses the keys of each token of a step for one layer.

    Args:
        cache_name: name of the layer's index cache in vLLM.
        num_heads: index heads.
        index_size: elements of an index row.
        top_k: keys that a token attends to.

    Raises:
        LayerRefusedError: the backend does not take such an indexer.
    """

    def __init__(self, cache_name: str, num_heads: int, index_size: int, top_k: int) -> None:
        request = layer_request(head_size=index_size, num_heads=num_heads, num_kv_heads=1)
        refusals = AscendSFAIndexerBackend.refusals(request, judged_profile())
        if refusals:
            raise LayerRefusedError(AscendSFAIndexerBackend.name, refusals)
        self.cache_name = cache_name
        parallel = get_current_vllm_config().parallel_config
        self.spreads_prompts = parallel.prefill_context_parallel_size > 1
        # Since 0.32 every rank may have requests of its own to decode, whose rows all need.
        spreads_decodes = getattr(parallel, "pcp_shard_decode_requests", False)
        self.spreads_decodes = {"pcp_shard_decode_requests": True} if spreads_decodes else {}
        shares_keys = parallel.decode_context_parallel_size > 1
        ranks = TorchDCPGroup(get_dcp_group().device_group) if shares_keys else None
        self.layer = AscendSFAIndexerDCPImpl(num_heads, top_k, ranks, index_size)

    def choose(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Write this step's index rows and the choice of each of its tokens, in place.

        A step without metadata measures memory, and nothing is chosen.

        Args:
            query: [T, num_heads, 128] rotated index queries.
            key: [T, 128] normalised and rotated index rows.
            weights: [T, num_heads], scaled.
            index_cache: [num_blocks, block_size, 128].
            chosen: [max_num_tokens, top_k] int32; rows of this step's tokens are written.
        """
        metadata = self._metadata()
        if metadata is None:
            return
        step, cache = metadata.step, index_cache[:, None]
        rows, slots = maybe_gather_indexer_k(
            key,
            metadata.slot_mapping,
            metadata.num_decode_tokens,
            self.spreads_prompts,
            **self.spreads_decodes,
        )
        self.layer.write_kv(rows, cache, slots[: rows.shape[0]])
        chosen[: step.num_tokens] = self.layer.forward(query, weights, cache, step)[:, 0]

    def _metadata(self) -> LatentMetadata | None:
        """Metadata of the index cache in the step that vLLM is computing."""
        by_layer: Any = get_forward_context().attn_metadata
        if isinstance(by_layer, list):  # one entry per microbatch; vLLM splits none on a CPU
            (by_layer,) = by_layer
        return None if by_layer is None else by_layer[self.cache_name]


@torch.library.custom_op("ascend_vllm::choose_keys", mutates_args=("chosen",))
def choose_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    cache_name: str,
) -> None:
    """`KeyChooser.choose` as an operator, which a compiled model calls as a whole.

    Args:
        query: [T, num_heads, 128].
        key: [T, 128].
        weights: [T, num_heads].
        chosen: [max_num_tokens, top_k] int32, written in place.
        cache_name: the index cache, whose `chooser` is called.
    """
    cache = get_forward_context().no_compile_layers[cache_name]
    cache.chooser.choose(query, key, weights, cache.kv_cache, chosen)


@choose_keys.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    cache_name: str,
) -> None:
    return None

"""The standard backend (grouped-query and multi-head attention, paged cache) for vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from ascend_attn_backends import (
    AscendAttentionBackend,
    AscendAttentionMetadataBuilder,
    AscendMetadata,
    BackendRequest,
)
from ascend_attn_backends import AttentionBackend as BackendClass
from ascend_attn_ops import Refusal
from ascend_vllm_plugin.adapters.backend import AdaptedBackend
from ascend_vllm_plugin.adapters.layer import (
    SplitCache,
    layer_request,
    refusal,
    unknown_arguments,
)
from ascend_vllm_plugin.adapters.steps import StepMetadataBuilder
from ascend_vllm_plugin.environment import judged_profile
from ascend_vllm_plugin.errors import LayerRefusedError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImplBase, AttentionLayer


@attrs.frozen(eq=False, kw_only=True)
class StandardMetadata(AscendMetadata):
    """Metadata of a step, with the one field that vLLM reads itself.

    Attributes:
        causal: as vLLM said; its DFlash drafter asks whether a backend minds it.
    """

    causal: bool | torch.Tensor


class StandardMetadataBuilder(StepMetadataBuilder):
    """Translates a step for the builder of the standard backend."""

    step_builder = AscendAttentionMetadataBuilder

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StandardMetadata:
        """Metadata of one step; see the base class."""
        built = self.build_step(self.batch_of(common_attn_metadata))
        fields = attrs.asdict(built, recurse=False)
        return StandardMetadata(**fields, causal=common_attn_metadata.causal)


class StandardImpl(SplitCache, AttentionImpl[Any]):
    """Translates a layer's calls for a backend over keys and values of all heads.

    Attributes:
        backend: the backend of ascend-attn-backends.

    Raises:
        LayerRefusedError: the layer has something that the backend does not compute.
    """

    backend: ClassVar[type[BackendClass]] = AscendAttentionBackend

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **further: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        request = layer_request(
            head_size=head_size,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            sliding_window=sliding_window,
            has_alibi=alibi_slopes is not None,
            logits_soft_cap=logits_soft_cap or None,
            attn_type=str(getattr(attn_type, "value", attn_type)),
            has_sinks=sinks is not None,
        )
        refusals = self.backend.refusals(request, judged_profile())
        refusals += unknown_arguments(self.backend.name, kv_sharing_target_layer_name, further)
        refusals += self.further_refusals(request)
        if refusals:
            raise LayerRefusedError(self.backend.name, refusals)
        self._impl = self.make_impl()

    def further_refusals(self, request: BackendRequest) -> list[Refusal]:
        """What this adapter refuses beyond the backend."""
        return []

    def make_impl(self) -> Any:
        """The layer of the backend."""
        return self.backend.impl_class(
            self.num_heads, self.head_size, self.scale, self.num_kv_heads, self.sliding_window
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values [T, KN, D] to the slots [num_tokens <= T] of the cache.

        Slots below 0 are skipped. vLLM also calls this alone, to store context of a draft.
        """
        key_cache, value_cache = self.split_cache(kv_cache)
        self._impl.write_kv(key, value, key_cache, value_cache, slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of queries [T, N, D] over the cache; fills and returns `output` [T, N, D].

        Without metadata vLLM is measuring memory, and the output is 0.

        Raises:
            LayerRefusedError: a quantised output is wanted.
        """
        if output_scale is not None or output_block_scale is not None:
            name = self.backend.name
            raise LayerRefusedError(
                name,
                [refusal(name, "output_scale", "a scale", "None: the output is not quantised")],
            )
        if attn_metadata is None:
            return output.zero_()
        return self.attend((query, key, value), self.split_cache(kv_cache), attn_metadata, output)

    def attend(
        self,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        metadata: Any,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, on this step's queries, keys and values and both caches."""
        result: torch.Tensor = self._impl.forward(rows[0], *caches, metadata, output)
        return result

    def views_of(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of vLLM's cache [num_blocks, KN, block_size, 2 * D]: keys, then values."""
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]


class StandardBackend(AdaptedBackend):
    """What vLLM wants to know about the standard backend before it uses it."""

    impl_class: ClassVar[type[AttentionImplBase[Any]]] = StandardImpl
    builder_class: ClassVar[type[StepMetadataBuilder]] = StandardMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Head-major blocks first: the operator reads them as they are."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Requests may be causal or not, one by one."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """The operator's band mask."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only."""
        return attn_type == AttentionType.DECODER

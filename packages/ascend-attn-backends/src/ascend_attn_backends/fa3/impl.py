"""Per-layer work of the FA3 backend: write the cache, call flash-attn-npu or the reference."""

from __future__ import annotations

import torch

from ascend_attn_ops import current_provider
from ascend_attn_ops.selection import HOST_PROVIDERS

from ..errors import InvalidFieldError
from ..kv_layout import scatter_view
from ..paged_layer import PagedAttentionLayer
from .kernel import packed_attention
from .metadata import AscendFAMetadata
from .package import missing_package
from .reference import tokenwise_attention

PACKAGE, REFERENCE = "flash_attn_npu", "reference"


class AscendFAImpl(PagedAttentionLayer):
    """Attention of one layer as training computes it; without sliding windows.

    Args:
        num_heads: Query heads N of the layer on this rank.
        head_size: Elements per head D.
        scale: Factor on the scores, usually ``head_size ** -0.5``.
        num_kv_heads: Key/value heads KN; None means N.
        sliding_window: None; the argument is there because the other backends have it.
        provider: ``"flash_attn_npu"`` or ``"reference"``. None takes the package for NPU tensors
            where it is installed and no host provider is asked for
            (:func:`ascend_attn_ops.use_provider`), else the reference.

    Raises:
        InvalidFieldError: A count is not positive, N is not a multiple of KN, there is a window, or
            the provider is unknown.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        sliding_window: int | None = None,
        *,
        provider: str | None = None,
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, sliding_window)
        if sliding_window is not None:
            raise InvalidFieldError(
                "sliding_window", sliding_window, "None; the standard backend has windows"
            )
        if provider not in (None, PACKAGE, REFERENCE):
            raise InvalidFieldError("provider", provider, f"None, {PACKAGE} or {REFERENCE}")
        self.provider = provider

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AscendFAMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the cache, their own keys included.

        Args:
            query: ``[num_token_rows, N, D]``, any strides.
            key_cache: ``[num_blocks, KN, block_size, D]`` view; flash-attn-npu wants token-major
                memory, the reference takes any strides.
            value_cache: As ``key_cache``.
            metadata: Of this step.
            output: ``[num_token_rows, N, D]``, written in place. Rows after ``metadata.num_tokens``
                (padding) become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape or the memory of a cache does not fit.
            ascend_attn_ops.ProviderUnavailableError: flash-attn-npu was asked for and cannot be
                used here; the message says why.
        """
        self._check(query, key_cache, metadata, output)
        tokens = metadata.num_tokens
        if tokens:
            packed = self._provider(query.device.type) == PACKAGE
            attend = packed_attention if packed else tokenwise_attention
            caches = scatter_view(key_cache), scatter_view(value_cache)
            output[:tokens].copy_(
                attend(query[:tokens].contiguous(), *caches, metadata, self.scale)
            )
        output[tokens:].zero_()
        return output

    def _provider(self, device: str) -> str:
        if self.provider is not None:
            return self.provider
        preferred = (current_provider() or "").partition(",")[0].strip()
        hosted = device != "npu" or preferred in HOST_PROVIDERS
        return REFERENCE if hosted or missing_package() is not None else PACKAGE

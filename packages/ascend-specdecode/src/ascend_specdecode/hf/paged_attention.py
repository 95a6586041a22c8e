"""Attention of Hugging Face models through ascend-attn-backends: one packed row of tokens.

Transformers looks attention functions up by name and hands unknown keyword arguments of the
model's ``forward`` on to them; the step travels that way, so nothing is kept between calls.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import torch

from ascend_attn_backends import (
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AttentionBatch,
)
from ascend_specdecode.hf.paged_cache import PagedCache

ATTENTION_NAME: Final = "ascend_paged"
"""Name of the attention function in transformers' registry."""


@attrs.frozen(eq=False)
class PagedAttentionStep:
    """What the attention layers of one step share.

    Attributes:
        cache: where keys and values live.
        batch: the sequences of the step.
        metadata: made from the batch once, for all layers.
        impls: attention per (layer, window), made when a layer first runs.
    """

    cache: PagedCache
    batch: AttentionBatch
    metadata: Any
    impls: dict[tuple[int, int | None], AscendAttentionBackendImpl]


def paged_step(
    cache: PagedCache,
    batch: AttentionBatch,
    impls: dict[tuple[int, int | None], AscendAttentionBackendImpl],
) -> PagedAttentionStep:
    """The step of a batch; builds its metadata."""
    metadata = AscendAttentionMetadataBuilder(cache.block_size).build(batch)
    return PagedAttentionStep(cache, batch, metadata, impls)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    ascend_step: PagedAttentionStep,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values, attend over the cache.

    Args:
        module: the attention module; its ``layer_idx`` names the cache.
        query: [1, N, T, D] of all sequences of the step, one after the other.
        key: [1, KN, T, D].
        value: [1, KN, T, D].
        attention_mask: unused; the batch says who sees what.
        scaling: factor on the scores.
        ascend_step: the step.
        sliding_window: keys that a token sees, its own included; None for all.

    Returns:
        Output [1, T, N, D] and None.
    """
    layer: int = getattr(module, "layer_idx")  # noqa: B009 - not a tensor or a module
    caches = ascend_step.cache.layers[layer]
    impl = ascend_step.impls.get((layer, sliding_window))
    if impl is None:
        sizes = (query.shape[1], query.shape[3], scaling, key.shape[1])
        impl = AscendAttentionBackendImpl(*sizes, sliding_window=sliding_window)
        ascend_step.impls[layer, sliding_window] = impl
    rows, key_rows, value_rows = (x[0].transpose(0, 1) for x in (query, key, value))
    impl.write_kv(key_rows, value_rows, *caches, ascend_step.metadata.slot_mapping)
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    impl.forward(rows, *caches, ascend_step.metadata, output)
    return output[None], None


def register_attention() -> None:
    """Make the function known to transformers; safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)

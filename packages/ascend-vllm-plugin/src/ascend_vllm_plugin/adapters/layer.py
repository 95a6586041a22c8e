"""What an adapter asks its backend about a layer that vLLM builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ascend_attn_backends import BackendRequest
from ascend_attn_ops import Refusal
from ascend_vllm_plugin.facts import engine_facts, provider_here, role_of_current_layer

SOURCE = "ascend_vllm_plugin.adapters"


def layer_request(**fields: Any) -> BackendRequest:
    """A layer in the words of ascend-attn-backends.

    Args:
        fields: What the layer was given: head size, heads, cache dtype, features. Role, dtype,
            block size, speculation and provider are those of the model that vLLM is building.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    return BackendRequest(
        role=role_of_current_layer(vllm_config),
        dtype=torch.get_default_dtype(),
        block_size=vllm_config.cache_config.block_size,
        causal=not vllm_config.attention_config.use_non_causal,
        provider=provider_here(),
        **engine_facts(vllm_config),
        **fields,
    )


def unknown_arguments(
    backend: str, shares_cache_with: str | None, further: Mapping[str, Any]
) -> list[Refusal]:
    """Refusals of arguments of a layer that only vLLM knows of.

    Args:
        backend: Name of the backend, for the rule.
        shares_cache_with: Layer whose cache this one reads, or None.
        further: Arguments that the adapter has no parameter for; None counts as absent.
    """
    given = {name: value for name, value in further.items() if value is not None}
    refusals = [refusal(backend, name, repr(value), "absent") for name, value in given.items()]
    if shares_cache_with is not None:
        own = "None: a cache of its own"
        name = "kv_sharing_target_layer_name"
        refusals.append(refusal(backend, name, shares_cache_with, own))
    return refusals


def refusal(backend: str, parameter: str, found: str, allowed: str) -> Refusal:
    """A refusal of an adapter."""
    return Refusal(f"{backend}.{parameter}", parameter, found, allowed, SOURCE)


class SplitCache:
    """The views of vLLM's one cache that a layer's operators take; mixed into an adapter.

    A layer has the same cache in every step, so its views are made once, and are the same objects.
    """

    _cache: Any = None
    _views: tuple[torch.Tensor, torch.Tensor]

    def split_cache(self, kv_cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The two views of the cache that vLLM hands over."""
        if kv_cache is not self._cache:
            self._cache, self._views = kv_cache, self.views_of(kv_cache)
        return self._views

    def views_of(self, kv_cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the views; how depends on who allocates caches."""
        raise NotImplementedError

"""Hugging Face models as targets and drafters (extra ``hf``).

* :class:`PagedTarget`: causal models with ordinary attention (Llama, Qwen3, SmolLM2 ...). A step's
  sequences run as one packed row of tokens through ascend-attn-backends over a paged cache.
* :class:`CachedTarget`: any causal model whose cache can be cropped (glm_moe_dsa ...), with its own
  attention; one cache per sequence.
* :class:`MtpDrafter`: the multi-token-prediction layer of a GLM or DeepSeek-V3.2 checkpoint.
* :class:`ModelDrafter`: a small target as a drafter.

Nothing here is imported by ``import ascend_specdecode``.
"""

from __future__ import annotations

from ascend_specdecode.hf.cached_target import CachedTarget
from ascend_specdecode.hf.loading import LoadedModel, load_model, load_target
from ascend_specdecode.hf.mtp_drafter import MtpDrafter
from ascend_specdecode.hf.mtp_layer import MtpLayer, load_mtp_layer
from ascend_specdecode.hf.paged_cache import PagedCache
from ascend_specdecode.hf.paged_target import PagedTarget

__all__ = [
    "CachedTarget",
    "LoadedModel",
    "MtpDrafter",
    "MtpLayer",
    "PagedCache",
    "PagedTarget",
    "load_model",
    "load_mtp_layer",
    "load_target",
]

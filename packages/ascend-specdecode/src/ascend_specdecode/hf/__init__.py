"""Hugging Face models as targets and drafters (extra ``hf``).

* :class:`PagedTarget`: causal models with ordinary attention (Llama, Qwen3, SmolLM2 ...). A step's
  sequences run as one packed row of tokens through ascend-attn-backends over a paged cache.
* :class:`SparseTarget`: glm_moe_dsa (GLM-5) in the same way, through our indexer and sparse latent
  backend.
* :class:`CachedTarget`: any causal model whose cache can be cropped (glm_moe_dsa ...), with its own
  attention; one cache per sequence.
* :class:`MtpModel`: the multi-token-prediction layer of a glm_moe_dsa checkpoint, for a
  ``HiddenStateDrafter``.
* :class:`CausalDraftModel`: a small causal model, for a ``ModelDrafter``.

Nothing here is imported by ``import ascend_specdecode``.
"""

from __future__ import annotations

from ascend_specdecode.hf.cached_target import CachedTarget
from ascend_specdecode.hf.draft_model import CausalDraftModel
from ascend_specdecode.hf.loading import LoadedModel, load_model, load_target
from ascend_specdecode.hf.mtp_layer import MtpLayer, load_mtp_layer
from ascend_specdecode.hf.mtp_model import MtpModel
from ascend_specdecode.hf.paged_cache import PagedCache
from ascend_specdecode.hf.paged_target import PagedTarget
from ascend_specdecode.hf.sparse_target import SparseTarget

__all__ = [
    "CachedTarget",
    "CausalDraftModel",
    "LoadedModel",
    "MtpLayer",
    "MtpModel",
    "PagedCache",
    "PagedTarget",
    "SparseTarget",
    "load_model",
    "load_mtp_layer",
    "load_target",
]

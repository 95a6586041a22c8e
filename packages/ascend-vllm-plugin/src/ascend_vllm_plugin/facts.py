"""What vLLM's configuration says about an attention layer, in the words of ascend-attn-backends.

vLLM asks for a backend with an `AttentionSelectorConfig`, which knows nothing of drafts; the rest
comes from the `VllmConfig` that is current while the layer is built. For a draft that is still the
target's: what belongs to the draft is read from `speculative_config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ascend_attn_backends import BackendRequest
from ascend_vllm_plugin import compat
from ascend_vllm_plugin.options import options_from

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

_PROVIDERS = {"npu": "torch_npu"}
"""Device type of vLLM's platform -> who computes the operators there; elsewhere it is `cpu`."""

_MARK = "_ascend_drafts_are_marked"
"""Attribute of a `SpeculativeConfig` that `mark_drafts` has seen; derived configs share it."""


def request_from(
    config: AttentionSelectorConfig, vllm_config: VllmConfig, num_heads: int | None
) -> BackendRequest:
    """vLLM's question about a layer as a request.

    Args:
        config: the question.
        vllm_config: the configuration that is current while the layer is built.
        num_heads: query heads on this rank, where vLLM says so.
    """
    parallel = vllm_config.parallel_config
    role = role_of_current_layer(vllm_config)
    model = _model_of(role, vllm_config)
    return BackendRequest(
        role=role,
        use_mla=config.use_mla,
        use_sparse=config.use_sparse,
        head_size=config.head_size,
        num_heads=num_heads or model.get_num_attention_heads(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype or "auto",
        block_size=vllm_config.cache_config.block_size,
        sliding_window=sliding_window(model) if config.has_sliding_window else None,
        causal=not config.use_non_causal,
        has_sinks=config.has_sink,
        has_multimodal_prefix=config.use_mm_prefix,
        attn_type=plain(config.attn_type),
        per_head_quant_scales=config.use_per_head_quant_scales,
        batch_invariant=config.use_batch_invariant,
        provider=provider_here(),
        **engine_facts(vllm_config),
    )


def provider_here() -> str:
    """Provider of the operators on vLLM's platform: `torch_npu` on an NPU, else `cpu`."""
    from vllm.platforms import current_platform

    return _PROVIDERS.get(current_platform.device_type, "cpu")


def engine_facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """What the engine's configuration says beside a layer's own facts, as fields of a request.

    A draft runs eager when its model does, or when the draft alone was told to. `explain` and
    simulate mode see the graphs that vLLM captures where they run, which on a CPU are none.
    """
    parallel, options = vllm_config.parallel_config, options_from(vllm_config.additional_config)
    speculative, target = vllm_config.speculative_config, vllm_config.model_config
    if speculative is not None and speculative.target_model_config is not None:
        target = speculative.target_model_config
    facts: dict[str, Any] = {
        # DCP spans the PCP ranks, or these and all TP ranks, or TP ranks alone (vLLM
        # config/parallel.py): one group holds the other, so their sizes do not multiply.
        "context_parallel_size": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        ),
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "training_consistency": options.training_consistency,
        "graph_mode": graph_mode(vllm_config),
        "speculative": speculative is not None,
        "runner": "v2" if vllm_config.use_v2_model_runner else "v1",
        "draft_flash_attn": options.draft_flash_attn,
        "target_model_type": None if target is None else target.hf_config.model_type,
    }
    draft = draft_model_of(speculative)
    if speculative is not None and draft is not None:
        facts["draft_eager"] = bool(draft.enforce_eager or speculative.enforce_eager)
        facts["draft_architecture"] = next(iter(draft.architectures), None)
    return facts


def graph_mode(vllm_config: VllmConfig) -> str:
    """What the engine captures in graphs: the name of vLLM's `CUDAGraphMode`, in small letters.

    `none` also where the model runs eager, and before vLLM has decided.
    """
    model, mode = vllm_config.model_config, vllm_config.compilation_config.cudagraph_mode
    if mode is None or (model is not None and model.enforce_eager):
        return "none"
    return str(mode.name).lower()


def role_of_current_layer(vllm_config: VllmConfig | None = None) -> str:
    """`target` or `draft`: whose layer vLLM is building.

    Two signs, each of them enough: the tag under which vLLM builds a model, and the backend that
    `mark_drafts` gave to drafts and only to them.

    Args:
        vllm_config: the configuration that is current; None asks vLLM for it.
    """
    from vllm.compilation import backends
    from vllm.config import get_current_vllm_config

    if backends.model_tag not in compat.TARGET_MODEL_TAGS:
        return "draft"
    config = vllm_config or get_current_vllm_config()
    marked = getattr(config.speculative_config, _MARK, False)
    return "draft" if marked and _ours(config.attention_config.backend) else "target"


def mark_drafts(vllm_config: VllmConfig) -> None:
    """Give drafts a backend of their own in vLLM's configuration; twice is the same as once.

    vLLM remembers answers by (backend, question, heads), and target and draft may ask the same
    question. Both runners ask for a draft's layers with `speculative_config.attention_backend`;
    naming our backend there, and nowhere else, keeps the two answers apart.
    """
    speculative, attention = vllm_config.speculative_config, vllm_config.attention_config
    if speculative is None or getattr(speculative, _MARK, False):
        return  # nothing to tell apart; or a configuration derived from one that we have seen
    if _ours(attention.backend):
        attention.backend = None  # what we answer anyway, and the name is the drafts' now
    attention.backend_per_kind = {
        kind: named for kind, named in attention.backend_per_kind.items() if not _ours(named)
    }
    if speculative.attention_backend is None:
        speculative.attention_backend = compat.our_backend()
    setattr(speculative, _MARK, True)


def draft_model_of(speculative: SpeculativeConfig | None) -> ModelConfig | None:
    """Configuration of the draft model; None for drafts without a model of their own (n-grams)."""
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    return None if draft is None or draft is speculative.target_model_config else draft


def sliding_window(model: ModelConfig) -> int | None:
    """The model's window in keys; vLLM's question only says that there is one.

    Source of the second: vLLM model_executor/models/qwen3_dflash.py, `_resolve_layer_attention`.
    """
    options = getattr(model.hf_config, "dflash_config", None) or {}
    for window in (
        options.get("swa_window_size"),
        model.get_sliding_window(),
        getattr(model.hf_text_config, "sliding_window", None),
    ):
        if window is not None:
            return int(window)
    return None


def plain(attn_type: object) -> str:
    """An attention type of vLLM, a string or an enum, as a string."""
    return str(getattr(attn_type, "value", attn_type))


def _model_of(role: str, vllm_config: VllmConfig) -> ModelConfig:
    """Configuration of the model that the layer belongs to."""
    draft = draft_model_of(vllm_config.speculative_config)
    return draft if role == "draft" and draft is not None else vllm_config.model_config


def _ours(backend: AttentionBackendEnum | None) -> bool:
    return backend is not None and backend.name == compat.OUR_BACKEND_NAME

"""What the standalone base does not have: refused before anything is loaded, with the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_attn_ops import Refusal
from ascend_vllm_plugin.errors import NotInThisBaseError
from ascend_vllm_plugin.npu.base import OVERLAY, STANDALONE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFT_METHODS = ("ngram", "custom_class")
"""Methods of speculative decoding whose drafts the host looks up."""

_SOURCE = "ascend_vllm_plugin.npu.limits"
_OVERLAY = f"the {OVERLAY} base has vllm-ascend's"


def require_in_standalone(vllm_config: VllmConfig) -> None:
    """Refuse a configuration that needs what only vllm-ascend has.

    Raises:
        NotInThisBaseError: with every reason.
    """
    refusals = [
        Refusal(
            rule=f"standalone.{parameter}",
            parameter=parameter,
            found=found,
            allowed=allowed,
            source=_SOURCE,
        )
        for parameter, found, allowed in _missing(vllm_config)
    ]
    if refusals:
        raise NotInThisBaseError(STANDALONE, refusals)


def _missing(config: VllmConfig) -> list[tuple[str, str, str]]:
    """(parameter, found, allowed) of what is asked for and is not there."""
    missing = []
    model, parallel = config.model_config, config.parallel_config
    if config.use_v2_model_runner:
        allowed = "the V1 runner (VLLM_USE_V2_MODEL_RUNNER=0): V2 needs a Triton for NPUs"
        missing.append(("VLLM_USE_V2_MODEL_RUNNER", "1", allowed))
    if model is not None and model.quantization is not None:
        allowed = f"none: {_OVERLAY} quantised layers"
        missing.append(("quantization", str(model.quantization), allowed))
    if model is not None and model.is_moe:
        allowed = f"models without experts: {_OVERLAY} MoE layers"
        missing.append(("architectures", ", ".join(model.architectures), allowed))
    method = None if config.speculative_config is None else str(config.speculative_config.method)
    if method is not None and method not in DRAFT_METHODS:
        allowed = (
            f"drafts without a model ({', '.join(DRAFT_METHODS)}): vLLM prepares the steps of "
        )
        missing.append(
            ("speculative_config", method, allowed + "a draft model with Triton kernels")
        )
    if config.kv_transfer_config is not None:
        found = str(config.kv_transfer_config.kv_connector)
        allowed = "none: connectors move blocks in which values follow keys"
        missing.append(("kv_connector", found, allowed))
    if config.lora_config is not None:
        missing.append(("enable_lora", "True", f"False: {_OVERLAY} LoRA layers"))
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        missing.append(("context parallel sizes", "above 1", "1"))
    return missing

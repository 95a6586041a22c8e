"""A backend for the prompts of MLA layers on an NPU, which is never asked.

vLLM's MLA layer wants a second backend, for prompts, when it is built. On a platform without a CUDA
capability it takes FlashAttention's, whose import fails without its kernels. Our metadata calls
every token a decode, prompts included, so that backend computes nothing: here it is the one of
vLLM that needs no kernels.
"""

from __future__ import annotations

from ascend_vllm_plugin.patches.replacement import replace_name


def apply() -> bool:
    """Have MLA layers take that backend; always needed."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    def without_kernels(vllm_config: object) -> object:
        return MLAPrefillBackendEnum.CPU.get_class()

    replace_name(mla_attention, without_kernels, "get_mla_prefill_backend")
    return True

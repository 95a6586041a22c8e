"""The attention layer of DeepSeek-V4, on the compressed backend.

vLLM's model chooses its attention layer by platform and asks nobody for a backend. The layer for
CPUs keeps fp8 rows in a layout of its own, and the builders of its metadata launch Triton kernels,
which the CPU build of vLLM lacks: `'function' object is not subscriptable`.
"""

from __future__ import annotations

from vllm.models.deepseek_v4.cpu import model

from ascend_vllm_plugin.adapters.dsa import CompressedAttention
from ascend_vllm_plugin.patches.replacement import replace_name


def apply() -> bool:
    """Have the model build our layer."""
    replace_name(model, CompressedAttention, "DeepseekV4CPUAttention")
    return True

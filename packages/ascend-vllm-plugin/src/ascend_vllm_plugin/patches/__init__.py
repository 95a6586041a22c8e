"""Changes to vLLM itself, one module each.

A module says why the change is needed; `PATCHES` says for which versions of vLLM. For each there is
a test that fails as soon as vLLM works without it, listed in `tests/integration/test_patches.py`
(those of `NPU_PATCHES`: in `tests/npu_path/test_npu_patches.py` of this package). Nothing is
changed at import, and a module is only imported to be applied: the worker applies the patches in
its own process before it builds the model: `PATCHES` in simulate mode, `NPU_PATCHES` in NPU mode on
the standalone base. On the overlay base vllm-ascend patches vLLM itself.
"""

from __future__ import annotations

from importlib import import_module

import attrs
from packaging.specifiers import SpecifierSet

from ascend_vllm_plugin.compat import SINCE_0_31, SUPPORTED_VLLM, require_supported_vllm


@attrs.frozen
class Patch:
    """One change to vLLM.

    Attributes:
        name: module of this package that holds it.
        reason: what goes wrong without it.
        versions: versions of vLLM that need it; the tests fail in one that does not.
    """

    name: str
    reason: str
    versions: SpecifierSet = SUPPORTED_VLLM

    def apply(self) -> bool:
        """Make the change; twice is the same as once. False when this process does not need it."""
        return bool(import_module(f"{__name__}.{self.name}").apply())


PATCHES = (
    Patch(
        name="kernel_scan",
        reason="the search for kernels to replace ends at llvmlite's library: '_lib_fn_wrapper' "
        "object has no attribute 'get'",
        versions=SUPPORTED_VLLM & SINCE_0_31,
    ),
    Patch(
        name="kernel_dispatchers",
        reason="speculative decoding on a CPU without Triton fails (Cannot inspect kernel "
        "parameters), and the parameters of sampling are lost",
    ),
    Patch(
        name="rotary_embedding",
        reason="the CPU kernel rotates the queries [tokens, heads, size] of MLA layers wrongly",
    ),
    Patch(
        name="indexer_cache",
        reason="the index cache of DeepSeek-V3.2 and GLM-5 holds fp8 rows in a layout of its own",
    ),
    Patch(
        name="indexer",
        reason="the indexer of DeepSeek-V3.2 and GLM-5 quantises its queries to fp8",
    ),
    Patch(
        name="sparse_attn_indexer",
        reason="the CPU form of the indexer's operator stops for DeepSeek-V3.2 and GLM-5",
    ),
    Patch(
        name="compressed_attention",
        reason="the attention layer of DeepSeek-V4 for CPUs holds fp8 rows and launches Triton "
        "kernels",
    ),
    Patch(
        name="dcp_merge",
        reason="ranks that share keys merge with Triton kernels, which must be compiled",
    ),
    Patch(
        name="interpreter_masks",
        reason="Triton's interpreter wants booleans as masks, and a kernel of DFlash2 makes others",
    ),
    Patch(
        name="dflash2_on_v1",
        reason="the V1 model runner refuses DFlash2 drafts: it does not select their candidates",
    ),
)


NPU_PATCHES = (
    Patch(
        name="npu_streams",
        reason="the V1 model runner takes its streams and events from torch.cuda",
    ),
    Patch(
        name="npu_slot_mapping",
        reason="the V1 model runner computes cache slots with a Triton kernel",
    ),
    Patch(
        name="npu_rejection",
        reason="the rejection sampler verifies drafts with Triton kernels",
    ),
    Patch(
        name="npu_mla_prefill",
        reason="MLA layers want FlashAttention's kernels for prompts, which nobody asks",
    ),
)


def apply_patches(patches: tuple[Patch, ...] = PATCHES) -> tuple[str, ...]:
    """Apply what the installed vLLM needs and return the names of the patches in force.

    Args:
        patches: those of the mode.

    Raises:
        UnsupportedVllmError: vLLM is outside the supported range.
    """
    version = require_supported_vllm()
    wanted = [patch for patch in patches if patch.versions.contains(version, prereleases=True)]
    return tuple(patch.name for patch in wanted if patch.apply())

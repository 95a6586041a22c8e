"""The platform of the standalone base: an NPU with vLLM's generic worker and runner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from ascend_vllm_plugin import selection
from ascend_vllm_plugin.compat import NPU_BLOCK_SIZE
from ascend_vllm_plugin.npu.announcement import announce_npu
from ascend_vllm_plugin.npu.device import npu
from ascend_vllm_plugin.npu.limits import require_in_standalone
from ascend_vllm_plugin.platform_steps import prepare_configuration, take_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

ADAPTERS: Mapping[str, str] = {
    "standard": "ascend_vllm_plugin.npu.backends.NpuStandardBackend",
    "mla": "ascend_vllm_plugin.npu.backends.NpuMLABackend",
}
"""Backend of ascend-attn-backends -> its adapter on this base."""

DTYPES = (torch.bfloat16, torch.float16)
"""Of models: the attention operators take no float32 (op-plugin docs)."""

WORKER = "ascend_vllm_plugin.npu.worker.StandaloneAscendWorker"

logger = init_logger("vllm.ascend_vllm_plugin")


class StandaloneAscendPlatform(Platform):
    """A device of type `npu` from outside vLLM's tree; layers take their native PyTorch form."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    dist_backend = "hccl"
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """No C kernels of vLLM: they are for other devices."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what this base lacks; take our worker, eager execution and blocks for CANN.

        vLLM calls this again for every configuration derived from the first.

        Raises:
            NotInThisBaseError: the configuration needs what only vllm-ascend has.
            NoBackendError: the model has layers that no backend of ours computes.
            OptionError: our part of `--additional-config` is wrong.
            NpuUnavailableError, EnvironmentVariableError: as `announce_npu`.
        """
        announce_npu()
        require_in_standalone(vllm_config)
        selection.require_attention_layers(vllm_config)
        prepare_configuration(vllm_config)
        take_worker(vllm_config, WORKER)
        # A forked process cannot use an NPU that its parent has touched.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        _run_eagerly(vllm_config)
        if not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = NPU_BLOCK_SIZE

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Class path of the attention backend for layers of one kind.

        Raises:
            NoBackendError: no backend takes them, or the user named one of vLLM's.
        """
        from vllm.config import get_current_vllm_config

        selection.require_our_backend(selected_backend)
        config = get_current_vllm_config()
        route = selection.select(attn_selector_config, config, num_heads, ADAPTERS)
        selection.record(attn_selector_config, route)
        return route.class_path

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Name of the NPU, as torch_npu says it."""
        return str(npu().get_device_name(device_id))

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Memory of the NPU in bytes."""
        return int(npu().get_device_properties(device_id).total_memory)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Bytes that tensors take now, and the start of a new peak."""
        npu().reset_peak_memory_stats(device)
        return float(npu().max_memory_allocated(device))

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Cube cores."""
        return int(npu().get_device_properties(device_id).cube_core_num)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make the NPU the current one."""
        npu().set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the generators of all NPUs."""
        npu().manual_seed_all(seed)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is one operator to vLLM, registered for the dispatch key of NPUs."""
        return True

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes of models, the preferred one first."""
        return [*DTYPES]

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Refuse dtypes that the attention operators do not take.

        Raises:
            ValueError: it is another one.
        """
        if dtype not in DTYPES:
            allowed = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
            found = str(dtype).removeprefix("torch.")
            raise ValueError(f"--dtype: found {found}; allowed on an NPU: {allowed}")


def _run_eagerly(vllm_config: VllmConfig) -> None:
    """No compiler and no graphs: inductor needs a Triton for NPUs, and a captured attention call
    would keep the lengths, which are integers of the host, of the step that was captured.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    if vllm_config.model_config is not None and not vllm_config.model_config.enforce_eager:
        logger.info_once("the %s base runs models eagerly: no compilation, no graphs", "standalone")

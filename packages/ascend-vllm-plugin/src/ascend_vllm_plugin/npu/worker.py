"""The worker of the standalone base: vLLM's generic worker on an NPU.

vLLM's own XPU worker is the model: what differs from a CUDA device is how the device is set up;
loading, memory profiling, KV caches and steps are inherited.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.utils import report_usage_stats
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from ascend_vllm_plugin.npu.device import npu
from ascend_vllm_plugin.npu.model_runner import StandaloneAscendModelRunner
from ascend_vllm_plugin.patches import NPU_PATCHES, apply_patches
from ascend_vllm_plugin.report import RoutingReports

logger = init_logger("vllm.ascend_vllm_plugin")


class StandaloneAscendWorker(RoutingReports, Worker):
    """Runs the model on an NPU with the attention backends of ascend-attn-backends."""

    def init_device(self) -> None:
        """Take the NPU of this rank, join the other ranks, and build the runner.

        The memory that is free is measured after the ranks have joined: HCCL takes some.
        """
        self.device = torch.device("npu", self._visible_device())
        npu().set_device(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)  # type: ignore[arg-type]
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        npu().empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        init_workspace_manager(self.device, 1)
        names = apply_patches(NPU_PATCHES)
        logger.info("patches to vLLM in force: %s", ", ".join(names) or "none")
        self.model_runner = StandaloneAscendModelRunner(self.vllm_config, self.device)
        if self.rank == 0:
            report_usage_stats(self.vllm_config)

    def _visible_device(self) -> int:
        """Number of this rank's NPU among those that the process sees.

        Raises:
            ValueError: there are fewer NPUs than ranks.
        """
        found = npu().device_count()
        if self.local_rank >= found:
            raise ValueError(
                f"rank {self.local_rank} of this machine has no NPU: found {found}; allowed: as "
                "many ranks as ASCEND_RT_VISIBLE_DEVICES shows NPUs"
            )
        return int(current_platform.logical_device_id_to_visible_device_id(self.local_rank))

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to compile, and vLLM's warm-up is of kernels for other devices."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        """No pool that can be put to sleep."""
        return nullcontext()

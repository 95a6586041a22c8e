"""The worker of simulate mode: vLLM's CPU worker, patched and reporting its routing."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from ascend_attn_ops import compile_loops
from ascend_vllm_plugin.compat import missing_model_kernels
from ascend_vllm_plugin.environment import explaining
from ascend_vllm_plugin.errors import ModelRefusedError
from ascend_vllm_plugin.patches import apply_patches
from ascend_vllm_plugin.report import RoutingReports

logger = init_logger("vllm.ascend_vllm_plugin")


class SimulatedAscendWorker(RoutingReports, CPUWorker):
    """Runs the model on the CPU with the attention backends of ascend-attn-backends."""

    def init_device(self) -> None:
        """Build vLLM's CPU model runner, then apply the patches.

        In this order: the runner's constructor places the kernels of the CPU itself, and the
        patches finish what it leaves undone. A process that only explains takes no steps; any other
        one is made ready for them, so that no request waits for a compiler.

        Raises:
            ModelRefusedError: the model calls kernels that vLLM has not for this processor.
        """
        super().init_device()  # type: ignore[no-untyped-call]  # vLLM left it untyped
        logger.info("patches to vLLM in force: %s", ", ".join(apply_patches()) or "none")
        if explaining():
            return
        require_model_kernels(self.model_config.hf_config.model_type)
        compiled = "compiled by numba" if compile_loops() else "left to torch: no numba"
        logger.info("decode and cache writes of the host provider: %s", compiled)


def require_model_kernels(model_type: str) -> None:
    """Check, before weights are loaded, that the model's first step will not miss a kernel.

    Raises:
        ModelRefusedError: it would.
    """
    missing = missing_model_kernels(model_type)
    if missing:
        raise ModelRefusedError(
            f"{model_type} calls {', '.join(missing)}, which vLLM's build for this processor does "
            "not have; allowed: a processor with AVX-512 and its bfloat16 instructions "
            "(avx512_bf16 in /proc/cpuinfo)"
        )

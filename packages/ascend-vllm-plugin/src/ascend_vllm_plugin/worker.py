"""The worker of simulate mode: vLLM's CPU worker, patched and reporting its routing."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from ascend_attn_ops import compile_loops
from ascend_vllm_plugin.patches import apply_patches
from ascend_vllm_plugin.report import RoutingReports

logger = init_logger("vllm.ascend_vllm_plugin")


class SimulatedAscendWorker(RoutingReports, CPUWorker):
    """Runs the model on the CPU with the attention backends of ascend-attn-backends."""

    def init_device(self) -> None:
        """Build vLLM's CPU model runner, then apply the patches and compile our loops.

        In this order: the runner's constructor places the kernels of the CPU itself, and the
        patches finish what it leaves undone. No request waits for a compiler.
        """
        super().init_device()  # type: ignore[no-untyped-call]  # vLLM left it untyped
        logger.info("patches to vLLM in force: %s", ", ".join(apply_patches()) or "none")
        compiled = "compiled by numba" if compile_loops() else "left to torch: no numba"
        logger.info("decode and cache writes of the host provider: %s", compiled)

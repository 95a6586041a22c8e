"""The worker of simulate mode: vLLM's CPU worker, patched and reporting its routing."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from ascend_vllm_plugin.patches import apply_patches
from ascend_vllm_plugin.report import report_plans, report_routing, routing_table

logger = init_logger("vllm.ascend_vllm_plugin")


class SimulatedAscendWorker(CPUWorker):
    """Runs the model on the CPU with the attention backends of ascend-attn-backends."""

    _routing_reported = False

    def init_device(self) -> None:
        """Build vLLM's CPU model runner, then apply the patches.

        In this order: the runner's constructor places the kernels of the CPU itself, and the
        patches finish what it leaves undone.
        """
        super().init_device()  # type: ignore[no-untyped-call]  # vLLM left it untyped
        logger.info("patches to vLLM in force: %s", ", ".join(apply_patches()) or "none")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, then log the routing of its layers and write the routing file."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.rank == 0:
            report_routing(self.vllm_config, self.model_runner.get_model())
            self._routing_reported = True

    def routing(self) -> str:
        """The routing table as JSON, with the plans so far: `LLM.collective_rpc("routing")`."""
        return routing_table(self.vllm_config, self.model_runner.get_model()).to_json()

    def shutdown(self) -> None:
        """Say what plans the drafts have used, then stop as vLLM's worker does."""
        if self._routing_reported:
            report_plans(self.vllm_config, self.model_runner.get_model())
            self._routing_reported = False
        super().shutdown()

"""The model runner of the standalone base: vLLM's V1 runner on an NPU."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class StandaloneAscendModelRunner(GPUModelRunner):
    """vLLM's V1 runner; the patches of NPU mode must be in force before it is made."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.cascade_attn_enabled = False  # a common prefix is no case of its own for our backends

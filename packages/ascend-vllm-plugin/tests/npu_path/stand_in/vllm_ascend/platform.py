"""A stand-in of vllm-ascend's platform: names and signatures that vLLM 0.30 and the overlay use.

Written for these tests from vLLM's platform interface and the public names of vllm-ascend. What it
answers marks it as its own. `STAND_IN_LACKS` names a method that it is to lose.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from vllm.platforms import Platform, PlatformEnum

OWN = "vllm_ascend.attention"


class NPUPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    dist_backend = "hccl"
    simple_compile_backend = "eager"
    supported_quantization: ClassVar[list[str]] = ["ascend"]

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.config import CompilationMode

        vllm_config.compilation_config.mode = CompilationMode.NONE
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_ascend.worker.worker.NPUWorker"
        if not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = 128

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is not None and selected_backend.name == "FLASH_ATTN":
            return f"{OWN}.fa3_v1.AscendFABackend"
        kind = (
            "mla_v1.AscendMLA" if attn_selector_config.use_mla else "attention_v1.AscendAttention"
        )
        return f"{OWN}.{kind}Backend"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "stand-in"

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Nothing."""

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm_ascend.compilation.acl_graph.ACLGraphWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_ascend.distributed.device_communicators.npu_communicator.NPUCommunicator"


if "STAND_IN_LACKS" in os.environ:
    setattr(NPUPlatform, os.environ["STAND_IN_LACKS"], None)

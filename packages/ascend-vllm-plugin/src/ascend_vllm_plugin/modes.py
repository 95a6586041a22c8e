"""Simulate mode or NPU mode: what is asked for, which platform belongs to it, how it is called."""

from __future__ import annotations

from ascend_vllm_plugin.environment import request_simulation, simulation_requested
from ascend_vllm_plugin.npu.base import current_base
from ascend_vllm_plugin.npu.detection import emulated_npu, npu_in_use
from ascend_vllm_plugin.registration import SIMULATED_PLATFORM

SIMULATED = "simulated"


def ask_for_mode(profile: str | None) -> None:
    """Simulate, unless there is an NPU and nobody named a profile.

    Args:
        profile: SoC or family to simulate.

    Raises:
        EnvironmentVariableError: a variable is wrong.
        ascend_hwprofile.HwProfileError: no supported SoC or family.
    """
    if profile is None and not simulation_requested() and npu_in_use() is not None:
        return
    request_simulation(profile)


def expected_platform() -> str | None:
    """Class path of the platform that vLLM should take; None where the plugin stays out.

    Raises:
        PluginError: a variable is wrong, or a base of NPU mode is refused.
    """
    if simulation_requested():
        return SIMULATED_PLATFORM
    return None if npu_in_use() is None else current_base().platform


def running_mode() -> str:
    """`simulated`, or the base of NPU mode and what it runs on; read together with the SoC.

    Examples: `simulated`, `standalone on NPU`, `overlay on emulated CANN`.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type != "npu":
        return SIMULATED
    return f"{current_base().name} on {'NPU' if emulated_npu() is None else 'emulated CANN'}"

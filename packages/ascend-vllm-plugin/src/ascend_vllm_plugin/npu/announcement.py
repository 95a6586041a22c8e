"""The first thing that a platform of NPU mode does: say where it runs, and on which base."""

from __future__ import annotations

from vllm.logger import init_logger

from ascend_vllm_plugin.environment import pin_profile
from ascend_vllm_plugin.errors import NpuUnavailableError
from ascend_vllm_plugin.npu.base import current_base
from ascend_vllm_plugin.npu.detection import find_npu, profile_of

logger = init_logger("vllm.ascend_vllm_plugin")


def announce_npu() -> None:
    """Name the NPU's profile for the operators, and log which base runs on what, and why.

    Raises:
        NpuUnavailableError: there is no NPU any more, or nothing names its SoC.
        EnvironmentVariableError: `ASCEND_HWPROFILE` names an NPU of another family.
    """
    npu, base = find_npu(), current_base()
    if npu is None:
        raise NpuUnavailableError("there is no NPU", "See: ascend-hwprofile detect.")
    profile = profile_of(npu)
    pin_profile(profile.soc_name)
    logger.info_once(
        "NPU mode, %s base (%s), on %s (%s)",
        base.name,
        base.reason,
        "emulated CANN, no NPU" if npu.emulated else profile.soc_name,
        npu.evidence,
    )

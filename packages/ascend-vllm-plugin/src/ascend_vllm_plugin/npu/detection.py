"""Is there an NPU that vLLM could run on, and whose is the word?

Asked in every process of vLLM that has this package, on machines of any kind, so the cheap
questions come first: without torch_npu there is no NPU mode, and nothing else is looked at.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from ascend_hwprofile import HardwareProfile, System, detect, profile_for
from ascend_vllm_plugin.environment import PROFILE, npu_wish
from ascend_vllm_plugin.errors import EnvironmentVariableError, NpuUnavailableError

EMULATOR_LIBRARIES = "ASCEND_EMULATOR_LIBRARIES"
"""Set by `python -m ascend_attn_ops.emulator run` for the processes below it."""

_EMULATOR = "ascend_attn_ops.emulator"


@attrs.frozen
class Npu:
    """An NPU that was found.

    Attributes:
        soc_name: its SoC; None where it is there and nothing names it.
        emulated: whether CANN is emulated, so that no hardware is there.
        evidence: what was seen, as a sentence.
    """

    soc_name: str | None
    emulated: bool
    evidence: str


def find_npu() -> Npu | None:
    """The NPU of this machine or of the emulator, None without one; no device is opened.

    `ASCEND_HWPROFILE` is no evidence: it says what to simulate.
    """
    if find_spec("torch_npu") is None:
        return None
    return emulated_npu() or _hardware()


def npu_in_use() -> Npu | None:
    """The NPU that NPU mode would run on; None without one, or with `ASCEND_VLLM_NPU=off`.

    Raises:
        EnvironmentVariableError: `ASCEND_VLLM_NPU` is wrong.
    """
    return None if npu_wish() == "off" else find_npu()


def emulated_npu() -> Npu | None:
    """The emulated NPU of this process, None without an emulator."""
    module: Any = sys.modules.get(_EMULATOR)
    if module is not None:
        try:
            soc_name = module.current().profile.soc_name
        except module.EmulatorError:
            return None
        return Npu(soc_name, emulated=True, evidence=f"emulated CANN, {soc_name}")
    folder = os.environ.get(EMULATOR_LIBRARIES)
    if not folder:
        return None
    soc_name = json.loads((Path(folder) / "manifest.json").read_text("utf-8"))["soc"]
    return Npu(soc_name, emulated=True, evidence=f"emulated CANN, {soc_name}")


@cache
def _hardware() -> Npu | None:
    """What ascend-hwprofile sees; it asks CANN in a child process, so once is enough."""
    environ = {name: value for name, value in os.environ.items() if name != PROFILE}
    found = detect(System(environ=environ), cross_check=False)
    if not found.npu_seen:
        return None
    seen = next(one.detail for one in found.evidence if one.outcome == "found")
    if found.refusal is not None:
        seen = f"{seen}; {found.refusal}"
    soc_name = None if found.profile is None else found.profile.soc_name
    return Npu(soc_name, emulated=False, evidence=seen)


def profile_of(npu: Npu) -> HardwareProfile:
    """The profile that backends and operators are judged for on this NPU.

    Args:
        npu: what `find_npu` found; where it has no name, `ASCEND_HWPROFILE` gives it.

    Raises:
        NpuUnavailableError: nothing names the SoC.
        EnvironmentVariableError: `ASCEND_HWPROFILE` names an NPU of another family.
        ascend_hwprofile.HwProfileError: no supported SoC.
    """
    named = os.environ.get(PROFILE, "").strip()
    if npu.soc_name is None:
        if not named:
            raise NpuUnavailableError(
                f"the SoC has no name here ({npu.evidence})",
                f"Name it: {PROFILE}=SOC (see: ascend-hwprofile list).",
            )
        return profile_for(named)
    profile = profile_for(npu.soc_name)
    if named and profile_for(named).family is not profile.family:
        allowed = f"unset, or an {profile.family.value}: the NPU is an {profile.soc_name}"
        raise EnvironmentVariableError(PROFILE, named, f"{allowed} ({npu.evidence})")
    return profile

"""The JSON that the commands print. ``data/schema/cli.json`` documents each form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from ascend_hwprofile.profile import HardwareProfile
from ascend_hwprofile.records import OperatorSupport
from ascend_hwprofile.soc import SocId

if TYPE_CHECKING:
    from ascend_hwprofile.detection import Detection
    from ascend_hwprofile.diagnosis import Diagnosis

SCHEMA_VERSION = 1

Document = dict[str, Any]


def header(command: str) -> Document:
    """Return the fields that every document starts with."""
    return {"command": command, "schema_version": SCHEMA_VERSION}


def of_soc(soc: SocId) -> Document:
    """Return a parsed SoC name."""
    return {**attrs.asdict(soc), "supported": soc.refusal is None}


def of_operator(support: OperatorSupport) -> Document:
    """Return what is known of one operator."""
    return attrs.asdict(support)


def peak_rates(profile: HardwareProfile) -> dict[str, float | None]:
    """Return dtype -> peak rate in 10^12 operations per second."""
    return {dtype: profile.peak_tflops(dtype) for dtype in sorted(profile.dtypes)}


def of_profile(profile: HardwareProfile) -> Document:
    """Return a profile with the source of each figure."""
    return {
        "family": profile.family,
        "soc_name": profile.soc_name,
        "product": profile.product,
        "runtime_value": profile.runtime_value,
        "toolchain_core": profile.toolchain_core,
        "die_pair": profile.die_pair,
        "virtual_slices": list(profile.virtual_slices),
        "note": profile.note,
        "npu_arch": profile.npu_arch,
        "cube_cores": profile.cube_cores,
        "vector_cores": profile.vector_cores,
        "clock_mhz": profile.clock_mhz,
        "memory_bytes": profile.memory_bytes,
        "l2_bytes": profile.l2_bytes,
        "dtypes": sorted(profile.dtypes),
        "peak_tflops": peak_rates(profile),
        "capabilities": sorted(profile.capabilities),
        "missing": dict(profile.missing),
        "figures": {name: attrs.asdict(figure) for name, figure in profile.figures.items()},
        "operators": {name: of_operator(one) for name, one in profile.operators.items()},
    }


def of_detection(detection: Detection) -> Document:
    """Return a detection with its evidence."""
    profile = detection.profile
    return {
        "profile": None if profile is None else of_profile(profile),
        "simulated": detection.simulated,
        "refusal": detection.refusal,
        "conflicts": list(detection.conflicts),
        "evidence": [attrs.asdict(one) for one in detection.evidence],
    }


def of_diagnosis(diagnosis: Diagnosis) -> Document:
    """Return what the doctor found."""
    profile = diagnosis.detection.profile
    return {
        "soc_name": None if profile is None else profile.soc_name,
        "components": [attrs.asdict(one) for one in diagnosis.components],
        "checks": [attrs.asdict(check) for check in diagnosis.checks],
        "exit_code": diagnosis.exit_code,
    }

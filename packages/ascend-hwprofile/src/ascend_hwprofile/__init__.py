"""Hardware profiles of Huawei Ascend NPUs: what a SoC is, what it can do, and why not.

Names load on first use: ``import ascend_hwprofile`` itself reads no data file and imports neither
attrs nor rich nor torch.
"""

# Type checkers know this name; importing it from typing would cost as much as starting Python.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from ascend_hwprofile.detection import Detection, detect
    from ascend_hwprofile.errors import (
        HwProfileError,
        UnknownFigureError,
        UnknownOperatorError,
        UnknownSocError,
        UnsupportedSocError,
    )
    from ascend_hwprofile.probes import Evidence, Outcome
    from ascend_hwprofile.profile import HardwareProfile
    from ascend_hwprofile.profiles import (
        known_profiles,
        operator_names,
        profile_for,
        profile_from_environment,
    )
    from ascend_hwprofile.records import DtypeSupport, Figure, OperatorSupport
    from ascend_hwprofile.soc import SocId, known_socs, parse_soc_name
    from ascend_hwprofile.system import System
    from ascend_hwprofile.words import Capability, Confidence, Family

__all__ = [
    "Capability",
    "Confidence",
    "Detection",
    "DtypeSupport",
    "Evidence",
    "Family",
    "Figure",
    "HardwareProfile",
    "HwProfileError",
    "OperatorSupport",
    "Outcome",
    "SocId",
    "System",
    "UnknownFigureError",
    "UnknownOperatorError",
    "UnknownSocError",
    "UnsupportedSocError",
    "detect",
    "known_profiles",
    "known_socs",
    "operator_names",
    "parse_soc_name",
    "profile_for",
    "profile_from_environment",
]

_HOMES = {
    "Capability": "words",
    "Confidence": "words",
    "Detection": "detection",
    "DtypeSupport": "records",
    "Evidence": "probes",
    "Family": "words",
    "Figure": "records",
    "HardwareProfile": "profile",
    "HwProfileError": "errors",
    "OperatorSupport": "records",
    "Outcome": "probes",
    "SocId": "soc",
    "System": "system",
    "UnknownFigureError": "errors",
    "UnknownOperatorError": "errors",
    "UnknownSocError": "errors",
    "UnsupportedSocError": "errors",
    "detect": "detection",
    "known_profiles": "profiles",
    "known_socs": "soc",
    "operator_names": "profiles",
    "parse_soc_name": "soc",
    "profile_for": "profiles",
    "profile_from_environment": "profiles",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

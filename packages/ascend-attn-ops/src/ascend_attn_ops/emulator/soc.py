"""The emulated SoC: what ascend-hwprofile knows about it, as constants of the C sources."""

from __future__ import annotations

from ascend_hwprofile import HardwareProfile, HwProfileError, profile_for

from .errors import EmulatorOptionError

FAMILIES = ("A2", "A3", "A5")
CANN_VERSION = "9.1.0"  # the oldest that ascend-hwprofile's table pairs with torch_npu 2.13
_ASSUMED_MEMORY = 64 << 30  # where no source states the SoC's memory (Ascend950)


def emulated_profile(name: str) -> HardwareProfile:
    """Profile of a family or SoC name that the emulator can be.

    Raises:
        EmulatorOptionError: The name is unknown, or belongs to another family.
    """
    try:
        profile = profile_for(name)
    except HwProfileError as error:
        raise EmulatorOptionError(f"soc: {error}") from error
    if profile.family.value not in FAMILIES:
        raise EmulatorOptionError(
            f"soc: found {name!r} ({profile.family.value}); the emulator knows the families "
            f"{', '.join(FAMILIES)} and their SoC names"
        )
    return profile


def memory_bytes(profile: HardwareProfile) -> int:
    """Device memory in bytes: the stated one, or 64 GiB."""
    return profile.memory_bytes or _ASSUMED_MEMORY


def header(profile: HardwareProfile) -> str:
    """Text of soc.h; a figure that no source states is 0."""
    figures = {
        "CUBE_CORES": profile.require("cube_cores"),
        "VECTOR_CORES": profile.require("vector_cores"),
        "AI_CPUS": _figure(profile, "ai_cpus"),
        "UB_BYTES": _figure(profile, "ub_bytes"),
        "L2_BYTES": profile.l2_bytes or 0,
        "NPU_ARCH": profile.npu_arch or 0,
    }
    lines = [f'#define EMULATOR_SOC_NAME "{profile.soc_name}"']
    lines += [f"#define EMULATOR_{name} {value}" for name, value in figures.items()]
    lines.append(f"#define EMULATOR_MEMORY_BYTES {memory_bytes(profile)}ULL")
    lines.append(f'#define EMULATOR_CANN_VERSION "{CANN_VERSION}"')
    return "\n".join(lines) + "\n"


def _figure(profile: HardwareProfile, name: str) -> int:
    figure = profile.figure(name)
    return 0 if figure is None else int(figure.value)

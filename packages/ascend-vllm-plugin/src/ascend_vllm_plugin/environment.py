"""The environment variables that this package owns.

| variable | meaning |
|---|---|
| `ASCEND_VLLM_SIMULATE` | `1`: run on the CPU with a simulated profile; `0`, unset: do not |
| `ASCEND_VLLM_NPU` | what to do where an NPU is: `auto`, unset, `overlay`, `standalone` or `off` |
| `ASCEND_VLLM_ROUTING_FILE` | file that receives the routing table (JSON) once a model is loaded |
| `ASCEND_VLLM_EXPLAIN` | set by `ascend-vllm explain` for vLLM's processes: they load no weights |
| `ASCEND_VLLM_SERVER` | set by `ascend-vllm serve` for vLLM's processes: they end once it is gone |

The profile that is simulated comes from `ASCEND_HWPROFILE`, which ascend-hwprofile owns; in NPU
mode the platform writes there which NPU was found, for the operators and the workers.
`ASCEND_ATTN_PROVIDER`, which ascend-attn-ops owns, is read before an operator does, so that a wrong
name is told before a model loads.
"""

from __future__ import annotations

import os
from pathlib import Path

from ascend_hwprofile import HardwareProfile, profile_for, profile_from_environment
from ascend_vllm_plugin.errors import EnvironmentVariableError

SIMULATE = "ASCEND_VLLM_SIMULATE"
NPU = "ASCEND_VLLM_NPU"
ROUTING_FILE = "ASCEND_VLLM_ROUTING_FILE"
EXPLAIN = "ASCEND_VLLM_EXPLAIN"
SERVER = "ASCEND_VLLM_SERVER"
PROFILE = "ASCEND_HWPROFILE"
DEFAULT_FAMILY = "A5"

NPU_WISHES = ("auto", "overlay", "standalone", "off")
"""Values of `ASCEND_VLLM_NPU`; what the first three lead to is in `npu/base.py`."""


def simulation_requested() -> bool:
    """Whether the user asked for simulate mode.

    Raises:
        EnvironmentVariableError: `ASCEND_VLLM_SIMULATE` is neither `1`, `0` nor empty.
    """
    value = os.environ.get(SIMULATE, "")
    if value not in ("", "0", "1"):
        raise EnvironmentVariableError(SIMULATE, value, "1 (simulate) or 0 (do nothing)")
    return value == "1"


def npu_wish() -> str:
    """What the user wants where an NPU is; `auto` unless the variable says otherwise.

    Raises:
        EnvironmentVariableError: `ASCEND_VLLM_NPU` is none of `NPU_WISHES`.
    """
    value = os.environ.get(NPU, "") or NPU_WISHES[0]
    if value not in NPU_WISHES:
        raise EnvironmentVariableError(NPU, value, "one of: " + ", ".join(NPU_WISHES))
    return value


def known_providers() -> tuple[str, ...]:
    """Names of the providers that the operators have."""
    from ascend_attn_ops import all_operators

    return tuple(dict.fromkeys(name for one in all_operators() for name in one.providers))


def operator_providers() -> tuple[str, ...]:
    """The providers that the user named for the operators; empty when nobody did.

    Raises:
        EnvironmentVariableError: no operator has a provider of one of these names.
    """
    from ascend_attn_ops.context import PROVIDER_VARIABLE

    value = os.environ.get(PROVIDER_VARIABLE, "")
    if not value:
        return ()
    names, known = tuple(name.strip() for name in value.split(",")), known_providers()
    if not set(names) <= set(known):
        allowed = "one of these, or several with commas: " + ", ".join(known)
        raise EnvironmentVariableError(PROVIDER_VARIABLE, value, allowed)
    return names


def explaining() -> bool:
    """Whether this process only builds a model to explain its routing."""
    return os.environ.get(EXPLAIN, "") == "1"


def request_simulation(profile: str | None) -> None:
    """Ask for simulate mode, in this process and in those that it starts.

    Args:
        profile: SoC or family; None keeps what the environment says.

    Raises:
        ascend_hwprofile.HwProfileError: no supported SoC or family.
    """
    if profile is not None:
        os.environ[PROFILE] = profile_for(profile).soc_name
    os.environ[SIMULATE] = "1"


def judged_profile() -> HardwareProfile:
    """The profile that backends are judged for: `ASCEND_HWPROFILE`, else A5.

    Raises:
        ascend_hwprofile.HwProfileError: the variable names no supported SoC or family.
    """
    return profile_from_environment() or profile_for(DEFAULT_FAMILY)


def pin_profile(found: str | None = None) -> None:
    """Name the profile in the environment where the user named none.

    The operators then judge calls for the profile that the backends were selected for, in this
    process and in the workers that it starts.

    Args:
        found: SoC of the NPU in NPU mode, which is named in any case; None: the default one.
    """
    if found is not None or not os.environ.get(PROFILE):
        os.environ[PROFILE] = found or DEFAULT_FAMILY


def routing_file() -> Path | None:
    """Where the routing table is to be written; None when nobody asked for it.

    Raises:
        EnvironmentVariableError: the folder of the named file does not exist.
    """
    value = os.environ.get(ROUTING_FILE, "")
    if not value:
        return None
    path = Path(value)
    if path.is_dir() or not path.parent.is_dir():
        raise EnvironmentVariableError(ROUTING_FILE, value, "a file in a folder that exists")
    return path

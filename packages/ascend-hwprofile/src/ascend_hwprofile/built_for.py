"""Compares the SoC that kernels were built for with the one that is running."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator

from ascend_hwprofile import catalog
from ascend_hwprofile.errors import UnknownSocError
from ascend_hwprofile.profile import HardwareProfile
from ascend_hwprofile.soc import parse_soc_name
from ascend_hwprofile.system import System
from ascend_hwprofile.words import Family

_BUILD_INFO = re.compile(r"""__soc_version__\s*=\s*["'](?P<label>[^"']*)["']""")
_KERNELS = "op_impl/ai_core/tbe/kernel/ascend*"


def build_family(text: str) -> Family:
    """Return the family that a build string means.

    Build scripts write ``ascend910b`` for Atlas A2, where the SoC name ``Ascend910B`` would be the
    old card; strings of the compatibility table therefore come before SoC names.

    Raises:
        UnknownSocError: neither a build string nor a SoC name.
    """
    labels = catalog.read_table("compatibility")["build_labels"]
    label = labels.get(text.strip().lower())
    family = Family(label) if label else parse_soc_name(text).family
    if family is None:
        raise UnknownSocError(text, "it belongs to no family that kernels are built for")
    return family


def built_for_problem(built_for: str, running: HardwareProfile) -> str | None:
    """Return one sentence when kernels do not fit the running SoC, None when they do.

    Raises:
        UnknownSocError: ``built_for`` is neither a build string nor a SoC name.
    """
    family = build_family(built_for)
    if family is running.family:
        return None
    labels = catalog.read_table("compatibility")["build_labels"]
    right = next(label for label, name in labels.items() if name == running.family.value)
    return (
        f"built for {built_for} ({family}), but this machine has {running.soc_name} "
        f"({running.family}): install or rebuild the kernels for {right}"
    )


def built_kernels(system: System) -> Iterator[tuple[str, str]]:
    """Yield the build string and the place of every set of kernels that is installed."""
    roots = [root for root in (system.variable("ASCEND_CUSTOM_OPP_PATH") or "").split(":") if root]
    opp = system.variable("ASCEND_OPP_PATH")
    if opp is not None:
        roots += sorted(glob.glob(os.path.join(opp, "vendors", "*")))
    for root in roots:
        for folder in sorted(glob.glob(os.path.join(root, _KERNELS))):
            yield os.path.basename(folder), folder
    yield from _vllm_ascend_build(system)


def _vllm_ascend_build(system: System) -> Iterator[tuple[str, str]]:
    folder = system.package_folder("vllm_ascend")
    path = os.path.join(folder or "", "_build_info.py")
    if folder is None or not os.path.isfile(path):
        return
    with open(path, encoding="utf8", errors="replace") as file:
        match = _BUILD_INFO.search(file.read())
    if match:
        yield match["label"], path

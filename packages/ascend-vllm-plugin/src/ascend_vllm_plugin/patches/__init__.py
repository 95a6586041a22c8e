"""Changes to vLLM itself, one module each.

A module says why the change is needed and for which versions of vLLM; a test in
`tests/integration/test_patches.py` fails as soon as vLLM works without it. Nothing is changed
at import: the worker applies the patches in its own process, in simulate mode only.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from packaging.specifiers import SpecifierSet

from ascend_vllm_plugin.compat import require_supported_vllm
from ascend_vllm_plugin.patches import kernel_dispatchers


@attrs.frozen
class Patch:
    """One change to vLLM.

    Attributes:
        name: module of this package that holds it.
        reason: what goes wrong without it.
        versions: versions of vLLM that need it.
        apply: makes the change; doing it twice is the same as doing it once. Returns False
            when this process does not need it.
    """

    name: str
    reason: str
    versions: SpecifierSet
    apply: Callable[[], bool]


PATCHES = (
    Patch(
        name="kernel_dispatchers",
        reason=kernel_dispatchers.REASON,
        versions=SpecifierSet(">=0.30,<0.31"),
        apply=kernel_dispatchers.apply,
    ),
)


def apply_patches() -> tuple[str, ...]:
    """Apply what the installed vLLM needs and return the names of the patches in force.

    Raises:
        UnsupportedVllmError: vLLM is outside the supported range.
    """
    version = require_supported_vllm()
    wanted = [patch for patch in PATCHES if patch.versions.contains(version, prereleases=True)]
    return tuple(patch.name for patch in wanted if patch.apply())

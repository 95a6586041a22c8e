"""Which base NPU mode stands on: a pure decision, and the facts that it is fed with.

| wish (`ASCEND_VLLM_NPU`) | vllm-ascend | base |
|---|---|---|
| `auto` | none, or for another minor version of vLLM | `standalone` |
| `auto`, `overlay` | for this minor version, and it fits | `overlay` |
| `auto`, `overlay` | for this minor version, and something is missing | refused, with what |
| `overlay` | none, or for another minor version | refused |
| `standalone` | any | `standalone` |

A vllm-ascend that nearly fits is never passed over in silence: its user would lose its
quantisation, its MoE kernels and its communication without a word.
"""

from __future__ import annotations

from functools import cache

import attrs
from packaging.version import Version

from ascend_vllm_plugin.compat import require_supported_vllm
from ascend_vllm_plugin.environment import NPU, npu_wish
from ascend_vllm_plugin.errors import NpuBaseRefusedError
from ascend_vllm_plugin.npu.fit import VllmAscend, installed_vllm_ascend

OVERLAY, STANDALONE = "overlay", "standalone"

PLATFORMS = {
    OVERLAY: "ascend_vllm_plugin.npu.overlay.OverlayAscendPlatform",
    STANDALONE: "ascend_vllm_plugin.npu.platform.StandaloneAscendPlatform",
}
"""Base -> class path of its platform."""


@attrs.frozen
class Base:
    """The base that was chosen.

    Attributes:
        name: `overlay` or `standalone`.
        reason: why, as a phrase.
    """

    name: str
    reason: str

    @property
    def platform(self) -> str:
        """Class path of the platform that vLLM is given."""
        return PLATFORMS[self.name]


def choose_base(wish: str, vllm: str, vllm_ascend: VllmAscend | None) -> Base:
    """The base for a wish and what is installed; see the table of this module.

    Args:
        wish: `auto`, `overlay` or `standalone`.
        vllm: version of vLLM.
        vllm_ascend: the installed vllm-ascend, judged where it is for this vLLM; None without one.

    Raises:
        NpuBaseRefusedError: the wish cannot be met, or the installed vllm-ascend does not fit.
    """
    if wish == STANDALONE:
        return Base(STANDALONE, f"{NPU}={STANDALONE}")
    if vllm_ascend is None:
        missing = "vllm-ascend is not installed"
    elif not same_minor(vllm_ascend.version, vllm):
        missing = f"vllm-ascend {vllm_ascend.version} is for another vLLM than {vllm}"
    else:
        return _overlay(vllm, vllm_ascend)
    if wish == OVERLAY:
        raise NpuBaseRefusedError(missing, (), f"{NPU}={STANDALONE}")
    return Base(STANDALONE, missing)


def _overlay(vllm: str, vllm_ascend: VllmAscend) -> Base:
    said = f"vllm-ascend {vllm_ascend.version} for vLLM {vllm}"
    if vllm_ascend.misfits:
        raise NpuBaseRefusedError(
            f"{said} does not fit", vllm_ascend.misfits, f"{NPU}={STANDALONE}"
        )
    return Base(OVERLAY, f"{said} is installed and fits")


def same_minor(one: str, other: str) -> bool:
    """Whether two versions have the same major and minor number."""
    return Version(one).release[:2] == Version(other).release[:2]


def current_base() -> Base:
    """The base of this process: wish, vLLM and vllm-ascend as they are.

    Raises:
        EnvironmentVariableError: `ASCEND_VLLM_NPU` is wrong.
        UnsupportedVllmError: vLLM is outside the supported range.
        NpuBaseRefusedError: as `choose_base`.
    """
    return _base_for(npu_wish(), require_supported_vllm())


@cache
def _base_for(wish: str, vllm: str) -> Base:
    """Judging vllm-ascend imports it, so it is asked once, and only where it may be taken."""
    found = installed_vllm_ascend()
    if found is not None and wish != STANDALONE and same_minor(found.version, vllm):
        found = found.judged()
    return choose_base(wish, vllm, found)

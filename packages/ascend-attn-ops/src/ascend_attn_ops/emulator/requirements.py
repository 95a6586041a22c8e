"""Whether the emulator can work here, and if not, the one sentence that says why."""

from __future__ import annotations

import os
import platform
import shutil
import sys

from .._torch_import import cann_setting
from . import wheel
from .errors import EmulatorUnavailableError
from .trampolines import MACHINES


def compiler() -> str | None:
    """The C compiler that builds the libraries: ``CC``, gcc or cc; None when there is none."""
    wanted = os.environ.get("CC")
    names = (wanted,) if wanted else ("gcc", "cc")
    return next((name for name in names if shutil.which(name)), None)


def unavailable_reason() -> str | None:
    """Why the emulator cannot be used in this process, or None. Imports and builds nothing."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        found = f"{sys.platform} on {platform.machine()}"
        return f"the emulator runs on Linux on {' and '.join(MACHINES)}; this is {found}"
    cann = cann_setting()
    if cann is not None:
        return f"a real CANN is set up here ({cann}): use the NPU, or unset that to emulate one"
    if wheel.folder() is None:
        return (
            "torch_npu is not installed; pip install torch_npu==2.13.0 (the version of your torch)"
        )
    if compiler() is None:
        return "no C compiler was found (CC, gcc, cc); install gcc"
    return None


def require() -> None:
    """Raise when the emulator cannot be used.

    Raises:
        EmulatorUnavailableError: With the sentence of :func:`unavailable_reason`.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise EmulatorUnavailableError(reason)

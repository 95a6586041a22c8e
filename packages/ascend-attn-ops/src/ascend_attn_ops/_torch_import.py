"""Importing torch where torch_npu is installed and CANN is not.

``import torch`` imports an installed torch_npu, and fails when that fails, which it does without
the CANN libraries. Contracts, host providers and the emulator need torch in just that place, so
that torch is then asked not to look for backends, for the time of its import only. With CANN, or
below ``emulator run``, nothing is changed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_EMULATED = "ASCEND_EMULATOR_LIBRARIES"
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


def cann_setting() -> str | None:
    """The variable that says that a CANN is set up here, as ``NAME=value``, or None."""
    for name in _CANN_VARIABLES:
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and (Path(folder) / "libascendcl.so").exists():
            return f"LD_LIBRARY_PATH has {folder}"
    return None


def _backend_would_fail() -> bool:
    return (
        os.environ.get(_SWITCH, "1") == "1"
        and not os.environ.get(_EMULATED)
        and cann_setting() is None
        and "torch_npu" not in sys.modules
        and importlib.util.find_spec("torch_npu") is not None
    )


def import_torch() -> None:
    """Import torch, without backends that cannot be loaded here.

    Raises:
        ImportError: A CANN is said to be set up here, but torch_npu cannot be loaded with it.
    """
    if "torch" in sys.modules:
        return
    if not _backend_would_fail():
        _import_with_backends()
        return
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "0"
    try:
        importlib.import_module("torch")
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _import_with_backends() -> None:
    try:
        importlib.import_module("torch")
    except RuntimeError as error:
        setting = cann_setting()
        if setting is None:
            raise
        cause = error.__cause__ or error
        raise ImportError(
            f"{setting} says that CANN is set up here, but torch_npu cannot be loaded with it "
            f"({cause}); source the set_env.sh of that CANN, or unset the variable"
        ) from error


import_torch()

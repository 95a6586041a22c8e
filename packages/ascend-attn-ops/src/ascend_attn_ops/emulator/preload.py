"""Loading the libraries into a process, before torch_npu is imported.

Standard library only and without imports from this package: ``site/sitecustomize.py`` runs this
file by its path in every Python process below ``emulator run``, and importing the package would
import torch.

glibc finds a library that another one needs by its SONAME among those already loaded, so that
nothing has to be on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER_VARIABLE = "ASCEND_EMULATOR_LIBRARIES"  # folder of a build, for child processes
OPTIONS_VARIABLE = "ASCEND_EMULATOR_OPTIONS"  # JSON: devices, memory_bytes, cann, dump
_ATB_OPERATORS = ("_npu_paged_attention", "_npu_reshape_and_cache")
QUEUE_VARIABLE = "TASK_QUEUE_ENABLE"


class Callbacks(ctypes.Structure):
    """struct emulator_callbacks of executors.c."""

    RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
    FORGET = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
    RESOLVE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
    _fields_ = (("run", RUN), ("forget", FORGET), ("resolve", RESOLVE))


def load(folder: Path) -> dict[str, ctypes.CDLL]:
    """Load the libraries of a build for everyone in this process; again is harmless."""
    # With the queue torch_npu calls operators from a thread of its own and reports their errors
    # later, at another call.
    if os.environ.get(QUEUE_VARIABLE, "0") != "0":
        warnings.warn(
            f"{QUEUE_VARIABLE}={os.environ[QUEUE_VARIABLE]} is set to 0: the emulated NPU runs "
            "operators where they are called",
            stacklevel=2,
        )
    os.environ[QUEUE_VARIABLE] = "0"
    names = json.loads((folder / "manifest.json").read_text())["libraries"]
    return {name: ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in names}


def configure(runtime: ctypes.CDLL, opapi: ctypes.CDLL, options: dict[str, Any]) -> None:
    """Set devices, memory, CANN version and dump mode.

    Raises:
        ValueError: The runtime refuses the number of devices.
    """
    code = runtime.emulator_configure(
        ctypes.c_uint32(options["devices"]),
        ctypes.c_uint64(options["memory_bytes"]),
        options["cann"].encode(),
    )
    if code != 0:
        runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
        raise ValueError(runtime.aclGetRecentErrMsg().decode())
    opapi.emulator_set_dump(int(options["dump"]))


def set_callbacks(opapi: ctypes.CDLL, callbacks: Callbacks) -> None:
    """Tell libopapi.so whom to call; the caller keeps the structure alive."""
    opapi.emulator_set_callbacks.argtypes = [Callbacks]
    opapi.emulator_set_callbacks.restype = None
    opapi.emulator_set_callbacks(callbacks)


def prepare_child(folder: Path) -> None:
    """Load the libraries; the operators follow when the first one is called."""
    libraries = load(folder)
    options = json.loads(os.environ[OPTIONS_VARIABLE])
    opapi = libraries["libopapi.so"]
    configure(libraries["libascendcl.so"], opapi, options)

    def resolve(index: int, arguments: bytes | None) -> None:
        runtime = importlib.import_module("ascend_attn_ops.emulator.runtime")
        runtime.attach(folder, options).resolve(index, arguments)

    callbacks = Callbacks(resolve=Callbacks.RESOLVE(resolve))
    set_callbacks(opapi, callbacks)
    _KEPT.append(callbacks)
    after_import("torch_npu", replace_atb)


_KEPT: list[Any] = []  # callbacks and torch libraries live as long as the process


def replace_atb(_torch_npu: ModuleType) -> None:
    """Serve ATB's operators at torch's dispatcher: ATB is a C++ interface without C functions."""
    torch = sys.modules["torch"]
    library = torch.library.Library("atb", "IMPL")
    for name in _ATB_OPERATORS:
        library.impl(name, _atb_operator(name), "PrivateUse1")
    _KEPT.append(library)


def _atb_operator(name: str) -> Callable[..., Any]:
    def operator(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module("ascend_attn_ops.emulator.atb")
        return module.call(name, args, kwargs)

    return operator


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with module ``name``: now if it is loaded, else once it has been."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.action)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, action: Callable[[ModuleType], None]) -> None:
        self.inner = inner
        self.action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

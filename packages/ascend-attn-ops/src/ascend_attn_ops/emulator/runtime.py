"""The emulated device of this process: activation, recording, counters."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ascend_hwprofile import HardwareProfile

from ..context import use_profile
from . import preload
from . import soc as socs
from .builder import MANIFEST, build
from .errors import AlreadyActiveError, EmulatorError, EmulatorOptionError
from .record import Call, Counters, Recording

_HANDLES = ("tensors", "scalars", "int_arrays", "float_arrays", "bool_arrays", "tensor_lists",
            "scalar_lists", "executors")  # fmt: skip
_MEMORY_KINDS = {"device_allocations": 0, "host_allocations": 1}
_VERSION = re.compile(r"\d+\.\d+(\.\w+)*")  # 8.5.0, 8.2.RC1
MOST_DEVICES = 16  # as device.c
_current: Emulator | None = None
_LOCK = threading.RLock()  # the first operators of a process may be called by several threads


class Emulator:
    """An emulated NPU: the CANN libraries in this process and what happened on them.

    Made by :func:`activate`; there is one per process, and it stays, because torch_npu asks for
    its SoC only once. As a context manager it makes this package judge calls for the emulated SoC,
    as ``ascend_attn_ops.use_profile`` does.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder = folder
        self.options = options
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        self.profile: HardwareProfile = socs.emulated_profile(self.manifest["soc"])
        self._libraries = preload.load(folder)
        self._runtime = self._libraries["libascendcl.so"]
        self._opapi = self._libraries["libopapi.so"]
        self._declare()
        preload.configure(self._runtime, self._opapi, options)
        self._dispatcher: Any = None
        self._judged: list[AbstractContextManager[HardwareProfile]] = []
        self._callbacks = preload.Callbacks(
            preload.Callbacks.RUN(lambda number: self._dispatch().run(number)),
            preload.Callbacks.FORGET(lambda number: self._dispatch().forget(number)),
            preload.Callbacks.RESOLVE(self.resolve),
        )
        preload.set_callbacks(self._opapi, self._callbacks)

    def _declare(self) -> None:
        runtime, opapi = self._runtime, self._opapi
        runtime.emulator_counter_name.restype = ctypes.c_char_p
        for function in (
            runtime.emulator_counter_value,
            runtime.emulator_used_memory,
            runtime.emulator_live_allocations,
            opapi.emulator_live_handles,
        ):
            function.restype = ctypes.c_uint64
        self._counter_names: list[str] = []
        while (name := runtime.emulator_counter_name(len(self._counter_names))) is not None:
            self._counter_names.append(name.decode())

    def _dispatch(self) -> Any:
        """The operators; imported when the first one is called, or recorded."""
        if self._dispatcher is None:
            with _LOCK:
                self._dispatcher = self._dispatcher or self._make_dispatcher()
        return self._dispatcher

    def _make_dispatcher(self) -> Any:
        from . import abi, dispatch

        dispatch.load_kernels()
        abi.check_layout(self._opapi.emulator_handle_size)
        dispatcher = dispatch.Dispatcher(self._runtime, self._opapi)
        dispatcher.fill_slots()
        if "calls" in self.options:
            dispatcher.listeners.append(_Appender(Path(self.options["calls"])))
        return dispatcher

    def resolve(self, index: int, arguments: bytes | None) -> None:
        """An operator with an empty slot was called: fill it, or in dump mode show what with."""
        dispatcher = self._dispatch()
        if dispatcher.fill_slot(index):
            return
        name = dispatcher.operators[index]
        raw = None if arguments is None else arguments.decode(errors="replace")
        dispatcher.tell(Call(name, {}, refused="not emulated", raw=raw))
        if raw is not None:
            print(f"ascend emulator: {name}({raw})", file=sys.stderr, flush=True)

    @property
    def counters(self) -> Counters:
        """Counters of the runtime since the process began."""
        value = self._runtime.emulator_counter_value
        return Counters({name: value(i) for i, name in enumerate(self._counter_names)})

    @property
    def live(self) -> dict[str, int]:
        """Handles and allocations that exist now, and bytes of device memory in use."""
        live = {
            name: self._opapi.emulator_live_handles(kind)
            for kind, name in enumerate(_HANDLES, start=1)
        }
        for name, kind in _MEMORY_KINDS.items():
            live[name] = self._runtime.emulator_live_allocations(kind)
        live["device_bytes"] = sum(
            self._runtime.emulator_used_memory(device) for device in range(self.options["devices"])
        )
        return live

    @property
    def prepared_calls(self) -> int:
        """Operator calls whose second stage is still to come, or that a graph may replay."""
        return int(self._dispatch().prepared)

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Record operator calls and counters while the context is open."""
        recording = Recording(read=lambda: self.counters, start=self.counters)
        listeners, listener = self._dispatch().listeners, recording.calls.append
        listeners.append(listener)
        try:
            yield recording
        finally:
            listeners.remove(listener)
            recording.close()

    @contextlib.contextmanager
    def without_kernels(self) -> Iterator[None]:
        """Check and record operators, but compute nothing: outputs keep what was there.

        For large shapes, of which only the calls matter.
        """
        dispatcher = self._dispatch()
        dispatcher.computing = False
        try:
            yield
        finally:
            dispatcher.computing = True

    def tell(self, call: Call) -> None:
        """Add a call to what is being recorded."""
        self._dispatch().tell(call)

    def submit(self, operator: str, function: Callable[[], None], stream: int) -> None:
        """Run a function as a task of a stream: at once, or when its capture is replayed."""
        self._dispatch().submit(operator, function, stream)

    def set_memory(self, memory_bytes: int) -> None:
        """Change the size of the device memory, e.g. to see what happens when it is full."""
        self.options = {**self.options, "memory_bytes": memory_bytes}
        preload.configure(self._runtime, self._opapi, self.options)

    def __str__(self) -> str:
        return f"{self.profile.soc_name} on torch_npu {self.manifest['torch_npu']}"

    def __enter__(self) -> Emulator:
        judged = use_profile(self.profile)
        judged.__enter__()
        self._judged.append(judged)
        return self

    def __exit__(self, *error: Any) -> None:
        self._judged.pop().__exit__(*error)


class _Appender:
    """Writes each call as a line of JSON; several processes may append to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, call: Call) -> None:
        data = {
            "process": os.getpid(),
            "operator": call.operator,
            "arguments": call.described(),
            "refused": call.refused,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(data, default=str) + "\n")


def activate(
    soc: str = "A3",
    *,
    hide: Iterable[str] = (),
    devices: int = 1,
    memory_bytes: int | None = None,
    cann: str = socs.CANN_VERSION,
    dump: bool = False,
    import_torch_npu: bool = True,
) -> Emulator:
    """Emulate an NPU in this process; the libraries are built when the cache lacks them.

    Call it before torch_npu is imported. A second call with the same arguments returns the same
    emulator.

    Args:
        soc: Family (``A2``, ``A3``, ``A5``) or SoC name (``Ascend910B3``).
        hide: aclnn operators to leave out, as an older CANN would.
        devices: Number of NPUs.
        memory_bytes: Memory of each; default: the SoC's, or 64 GiB where no source states it.
        cann: CANN version that torch_npu is told.
        dump: Print the arguments of operators that are not emulated.
        import_torch_npu: Import torch_npu, as ``import torch`` does where CANN is installed; False
            for programs that call aclnn operators without it.

    Raises:
        EmulatorUnavailableError: It cannot work here; the message says why.
        EmulatorOptionError: There is no such SoC or operator, or a number is out of range.
        BuildError: The compiler failed.
        AlreadyActiveError: This process emulates another device, or torch_npu is imported already.
    """
    profile = socs.emulated_profile(soc)
    built = build(profile, hide=hide)
    served = _current is not None
    emulator = attach(built.folder, options(profile, devices, memory_bytes, cann, dump))
    if not served:  # also when the program imports torch_npu later
        preload.after_import("torch_npu", preload.replace_atb)
    if import_torch_npu:
        importlib.import_module("torch_npu")
    return emulator


def options(
    profile: HardwareProfile, devices: int, memory_bytes: int | None, cann: str, dump: bool
) -> dict[str, Any]:
    """What a process sets when it loads the libraries; JSON for child processes.

    Raises:
        EmulatorOptionError: A number is out of range.
    """
    memory_bytes = socs.memory_bytes(profile) if memory_bytes is None else memory_bytes
    for name, value, allowed in (
        ("devices", devices, range(1, MOST_DEVICES + 1)),
        ("memory_bytes", memory_bytes, range(1, 1 << 63)),
    ):
        if value not in allowed:
            bounds = f"{allowed[0]} to {allowed[-1]}"
            raise EmulatorOptionError(f"{name}: found {value!r}, allowed: {bounds}")
    if _VERSION.fullmatch(cann) is None:
        raise EmulatorOptionError(f"cann: found {cann!r}, allowed: a version such as 8.5.0")
    return {
        "devices": devices,
        "memory_bytes": memory_bytes,
        "cann": cann,
        "dump": dump,
    }


def attach(folder: Path, options: dict[str, Any]) -> Emulator:
    """The emulator of this process on the libraries of ``folder``.

    Raises:
        AlreadyActiveError: This process emulates another device, or torch_npu came first.
    """
    global _current
    with _LOCK:
        if _current is None:
            below_run = os.environ.get(preload.FOLDER_VARIABLE) == str(folder)
            if "torch_npu" in sys.modules and not below_run:
                raise AlreadyActiveError(
                    "torch_npu is imported already: activate the emulator before"
                )
            _current = Emulator(folder, options)
        elif (_current.folder, _current.options) != (folder, options):
            raise AlreadyActiveError(
                f"this process already emulates {_current.profile.soc_name} with "
                f"{_current.options}, hidden: {_current.manifest['hidden']}; torch_npu asks for "
                "the device only once, use another process"
            )
        return _current


def current() -> Emulator:
    """The active emulator of this process.

    Raises:
        EmulatorError: None is active.
    """
    if _current is None:
        folder = os.environ.get(preload.FOLDER_VARIABLE)
        if folder is None:
            raise EmulatorError("no emulator is active in this process; call activate() first")
        return attach(Path(folder), json.loads(os.environ[preload.OPTIONS_VARIABLE]))
    return _current

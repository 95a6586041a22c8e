"""Finding and loading the C libraries of CANN, real or emulated."""

from __future__ import annotations

import ctypes
import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ...refusals import ProviderUnavailableError
from .errors import MissingOperatorError, error_for

_SUCCESS = 0
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_BY_REFERENCE = ctypes.POINTER(ctypes.c_void_p)
# What the headers acl_rt.h and acl_meta.h declare; functions that are not named return a code.
_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "aclInit": (ctypes.c_char_p,),
    "aclrtSetDevice": (ctypes.c_int32,),
    "aclrtResetDevice": (ctypes.c_int32,),
    "aclrtCreateStream": (_BY_REFERENCE,),
    "aclrtDestroyStream": (_POINTER,),
    "aclrtSynchronizeStream": (_POINTER,),
    "aclrtMalloc": (_BY_REFERENCE, _SIZE, _INT),
    "aclrtFree": (_POINTER,),
    "aclrtMemcpy": (_POINTER, _SIZE, _POINTER, _SIZE, _INT),
    "aclDestroyAclOpExecutor": (_POINTER,),
    "aclCreateTensor": (
        _POINTER, ctypes.c_uint64, _INT, _POINTER, ctypes.c_int64, _INT, _POINTER,
        ctypes.c_uint64, _POINTER,
    ),
    "aclCreateScalar": (_POINTER, _INT),
    **dict.fromkeys(
        ("aclCreateTensorList", "aclCreateScalarList", "aclCreateIntArray",
         "aclCreateFloatArray", "aclCreateBoolArray"), (_POINTER, ctypes.c_uint64)
    ),
    **dict.fromkeys(
        ("aclDestroyTensor", "aclDestroyScalar", "aclDestroyTensorList", "aclDestroyScalarList",
         "aclDestroyIntArray", "aclDestroyFloatArray", "aclDestroyBoolArray"), (_POINTER,)
    ),
}  # fmt: skip


@cache
def _data() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath("libraries.toml").read_text("utf-8")
    return tomllib.loads(text)


def _is_loaded(name: str) -> bool:
    """Whether the process has a library of this SONAME already, through torch_npu for example."""
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def library_folders() -> list[Path]:
    """Folders in which the libraries are looked for, in order; they need not exist."""
    data = _data()
    homes = [os.environ[name] for name in data["home_variables"] if os.environ.get(name)]
    folders = [Path(home) / part for home in homes for part in data["home_folders"]]
    emulated = os.environ.get(data["emulator_variable"])
    searched = os.environ.get(data["search_variable"], "")
    return [
        *([Path(emulated)] if emulated else []),
        *folders,
        *(Path(entry) for entry in searched.split(":") if entry),
    ]


def _located(name: str) -> str | None:
    """What to pass to dlopen: the name where the library is loaded, else a path."""
    if _is_loaded(name):
        return name
    found = (folder / name for folder in library_folders())
    return next((str(path) for path in found if path.is_file()), None)


def unavailable_reason() -> str | None:
    """Why CANN cannot be called directly in this process, or None. Loads nothing."""
    name = str(_data()["runtime"])
    if _located(name) is not None:
        return None
    homes = " nor ".join(_data()["home_variables"])
    return (
        f"no CANN: {name} is not loaded, neither {homes} leads to it, nor is it on "
        f"{_data()['search_variable']}; install the CANN toolkit and source its set_env.sh, or "
        "emulate one: python -m ascend_attn_ops.emulator run"
    )


def custom_folders() -> Iterator[Path]:
    """``op_api`` folders of installed packages of custom operators, the preferred ones first."""
    data = _data()
    folders = [
        Path(entry) for entry in os.environ.get(data["custom_variable"], "").split(":") if entry
    ]
    packages = os.environ.get(data["packages_variable"])
    if packages:
        vendors = Path(packages) / "vendors"
        folders += [vendors / name for name in _vendor_priority(vendors / "config.ini")]
    for folder in folders:
        yield folder / "op_api"


def custom_libraries() -> Iterator[Path]:
    """Libraries of installed packages of custom operators, the preferred ones first."""
    for folder in custom_folders():
        path = folder / "lib" / str(_data()["custom"])
        if path.is_file():
            yield path


def header_folders() -> list[Path]:
    """Folders in which the headers of operators are looked for, in order; they need not exist."""
    data = _data()
    homes = [os.environ[name] for name in data["home_variables"] if os.environ.get(name)]
    folders = [Path(home) / part for home in homes for part in data["home_headers"]]
    return [*(folder / "include" for folder in custom_folders()), *folders]


def _vendor_priority(config: Path) -> list[str]:
    """``load_priority=a,b`` of a config.ini."""
    if not config.is_file():
        return []
    for line in config.read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "load_priority":
            return [name.strip() for name in value.split(",") if name.strip()]
    return []


class Cann:
    """The loaded libraries: functions by name, with codes turned into errors.

    Raises:
        ProviderUnavailableError: There is no CANN here; the message says where it was looked for.
    """

    def __init__(self) -> None:
        reason = unavailable_reason()
        if reason is not None:
            raise ProviderUnavailableError(reason)
        names = [_data()["runtime"], *_data()["operators"]]
        paths = [path for name in names if (path := _located(name)) is not None]
        self.paths = [paths[0], *map(str, custom_libraries()), *paths[1:]]
        self._libraries = [ctypes.CDLL(path, mode=os.RTLD_GLOBAL) for path in self.paths]
        self._functions: dict[str, Any] = {}
        self._message = self._find("aclGetRecentErrMsg")
        self._message.restype = ctypes.c_char_p

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            function = getattr(library, name, None)
            if function is not None:
                return function
        raise MissingOperatorError(name, self.paths)

    def function(self, name: str, *argument_types: Any, result: Any = _INT) -> Any:
        """The C function ``name``, its types declared once.

        Raises:
            MissingOperatorError: No library has it.
        """
        if name not in self._functions:
            function = self._find(name)
            function.argtypes = argument_types or _ARGUMENTS.get(name, ())
            function.restype = result
            self._functions[name] = function
        return self._functions[name]

    def has(self, name: str) -> bool:
        """Whether a library has this function."""
        return any(hasattr(library, name) for library in self._libraries)

    @property
    def emulated(self) -> bool:
        """Whether this is the emulator of this package and no real CANN."""
        return self.has("emulator_operator_count")

    def recent_message(self) -> str:
        """Text of the last failure in this thread; CANN clears it when it is read."""
        return (self._message() or b"").decode(errors="replace").strip()

    def check(self, code: int, symbol: str) -> None:
        """Raise the error of a code that is not success."""
        if code != _SUCCESS:
            raise error_for(code, symbol, self.recent_message())

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a code.

        Raises:
            CannError: The code is not success.
        """
        self.check(self.function(name)(*arguments), name)


@cache
def load() -> Cann:
    """The libraries of this process, loaded at the first call."""
    return Cann()

"""What the installed torch_npu wheel needs that this machine does not have."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import platform
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import attrs

from .elf import Library, read_library

_FIRST_STAGE = re.compile(rb"\0(aclnn[A-Za-z0-9]+)Get(?:Max)?WorkspaceSize(?=\0)")
_MAX_WORKSPACE = re.compile(rb"\0(aclnn[A-Za-z0-9]+)GetMaxWorkspaceSize(?=\0)")
_SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2",
           "librt.so.1", "libpthread.so.0", "libgomp.so.1")  # fmt: skip


def folder() -> Path | None:
    """Folder of the installed torch_npu package, or None. Imports nothing."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def version() -> str:
    """Version of the installed torch_npu distribution."""
    return importlib.metadata.version("torch_npu")


@attrs.frozen
class Needs:
    """What must be built for a wheel.

    Attributes:
        libraries: Shared libraries that its files load and nobody has.
        symbols: Symbols that its files need when they are loaded and nobody defines.
        operators: aclnn operators that it looks up when they are called.
        max_workspace: Those of them with a ``GetMaxWorkspaceSize`` form.
    """

    libraries: tuple[str, ...]
    symbols: tuple[str, ...]
    operators: tuple[str, ...]
    max_workspace: frozenset[str]


def scan(npu: Path, torch: Path) -> Needs:
    """Read the ELF files of torch_npu in ``npu`` against those of torch and the system."""
    own = {path.name: read_library(path) for path in _own_files(npu)}
    others = [read_library(path) for path in _other_files(npu, torch)]
    known = set(own) | {
        library.soname for library in [*own.values(), *others] if library.soname is not None
    }
    defined = frozenset().union(*(library.defined for library in [*own.values(), *others]))
    operators, max_workspace = _operators(npu / "lib" / "libtorch_npu.so")
    return Needs(
        libraries=_missing_libraries(list(own.values()), known),
        symbols=_missing_symbols(list(own.values()), defined),
        operators=operators,
        max_workspace=max_workspace,
    )


def _own_files(npu: Path) -> Iterator[Path]:
    yield from (npu / "lib").glob("*.so")
    yield from npu.glob("_C*.so")
    yield from npu.parent.glob("torch_npu.libs/*.so*")


def _other_files(npu: Path, torch: Path) -> Iterator[Path]:
    accelerators = ("libtorch_cuda", "libcu", "libnccl", "libnv")
    for path in (torch / "lib").glob("*.so*"):
        if not path.name.startswith(accelerators):
            yield path
    multiarch = f"{platform.machine()}-linux-gnu"
    folders = [Path("/lib") / multiarch, Path("/usr/lib") / multiarch, Path("/lib64"),
               Path("/usr/lib64"), Path("/lib"), Path("/usr/lib")]  # fmt: skip
    for name in _SYSTEM:
        found = next((folder / name for folder in folders if (folder / name).exists()), None)
        if found is not None:
            yield found


def _missing_libraries(own: Collection[Library], known: set[str]) -> tuple[str, ...]:
    needed = {name for library in own for name in library.needed}
    system = re.compile(r"ld-linux.*|" + "|".join(map(re.escape, _SYSTEM)))
    return tuple(sorted(name for name in needed - known if not system.fullmatch(name)))


def _missing_symbols(own: Collection[Library], defined: frozenset[str]) -> tuple[str, ...]:
    needed = {name for library in own for name in library.undefined}
    return tuple(sorted(name for name in needed - defined if not name.startswith(("Py", "_Py"))))


def _operators(library: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    """Operators are looked up by name: the names are strings of the library."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = {match.group(1).decode() for match in _FIRST_STAGE.finditer(data)}
        longest = {match.group(1).decode() for match in _MAX_WORKSPACE.finditer(data)}
    return tuple(sorted(names)), frozenset(longest)

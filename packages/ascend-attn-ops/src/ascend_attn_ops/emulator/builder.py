"""Building and caching the shared libraries that the installed torch_npu wheel needs.

A build is a folder: the libraries, and ``manifest.json`` with the order of loading. It is made
beside its place and renamed into it, so that a folder is complete or absent, whoever else builds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from ascend_hwprofile import HardwareProfile

from ..aclnn_abi import known_signatures
from . import requirements, soc, trampolines, wheel
from .errors import BuildError, EmulatorOptionError, EmulatorUnavailableError

_RUNTIME = ("state", "device", "memory", "copies", "streams", "graphs", "events", "single_ops")
_OPERATORS = ("handles", "opapi", "executors", "describe")
_FLAGS = ("-std=gnu11", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror")
_RECIPE = ("builder.py", "trampolines.py", "wheel.py", "elf.py")
_OPENED_LATER = ("libnnopbase.so",)  # torch_npu opens it for the workspace of captured operators
MANIFEST = "manifest.json"
CACHE_VARIABLE = "ASCEND_EMULATOR_CACHE"


@attrs.frozen
class Build:
    """A complete set of libraries.

    Attributes:
        folder: Where they are.
        manifest: What they were made for: ``libraries`` in loading order, ``soc``, ``torch_npu``,
            ``hidden``, ``operators`` (how many), ``seconds``.
        fresh: Whether this call compiled them.
    """

    folder: Path
    manifest: dict[str, Any]
    fresh: bool


def cache_folder() -> Path:
    """Where builds are kept: ``ASCEND_EMULATOR_CACHE``, else under ``XDG_CACHE_HOME``."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ascend-attn-ops" / "emulator"


def build(profile: HardwareProfile, *, hide: Iterable[str] = ()) -> Build:
    """The libraries for the installed torch_npu, made now or found in the cache.

    Args:
        profile: SoC to emulate.
        hide: aclnn operators that the libraries shall not have, as in an older CANN.

    Raises:
        EmulatorUnavailableError: Something is missing here, or the cache cannot be written.
        EmulatorOptionError: ``hide`` names what torch_npu does not know.
        BuildError: The compiler failed.
    """
    requirements.require()
    hidden = tuple(sorted(set(hide)))
    target = cache_folder() / _key(profile, hidden)
    if (target / MANIFEST).is_file():
        return Build(target, json.loads((target / MANIFEST).read_text()), fresh=False)
    try:
        return Build(target, _built_beside(target, profile, hidden), fresh=True)
    except OSError as error:
        raise EmulatorUnavailableError(
            f"the libraries cannot be written to {target.parent} ({error}); set "
            f"{CACHE_VARIABLE} to a folder that can be"
        ) from error


def _built_beside(
    target: Path, profile: HardwareProfile, hidden: tuple[str, ...]
) -> dict[str, Any]:
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        manifest = _make(work, profile, hidden)
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already when it was renamed
    return manifest


def _publish(work: Path, target: Path) -> None:
    work.chmod(0o755)
    try:
        work.rename(target)
    except OSError:
        if not (target / MANIFEST).is_file():  # otherwise another process was faster
            raise


def _sources() -> Path:
    return Path(str(resources.files(__package__).joinpath("csrc")))


def _key(profile: HardwareProfile, hidden: Sequence[str]) -> str:
    """Readable start, then a hash of all that the result depends on."""
    digest = hashlib.sha256(soc.header(profile).encode())
    given = [platform.machine(), hidden, _FLAGS, sorted(known_signatures())]
    digest.update(json.dumps(given).encode())
    recipe = [Path(__file__).with_name(name) for name in _RECIPE]
    for path in [*recipe, *sorted(_sources().iterdir())]:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return f"torch_npu-{wheel.version()}-{profile.soc_name}-{digest.hexdigest()[:16]}"


def _make(work: Path, profile: HardwareProfile, hidden: tuple[str, ...]) -> dict[str, Any]:
    started = time.perf_counter()
    npu = wheel.folder()
    assert npu is not None  # noqa: S101 - require() has looked
    needs = wheel.scan(npu, npu.parent / "torch")
    # Operators that torch_npu does not call, but other packages do, are known by their signature.
    known = sorted({*needs.operators, *known_signatures()})
    unknown = sorted(set(hidden) - set(known))
    if unknown:
        raise EmulatorOptionError(
            f"hide: torch_npu {wheel.version()} calls no {', '.join(unknown)}"
        )
    operators = [name for name in known if name not in hidden]
    _write_generated(work, profile, needs, operators)
    libraries = [*needs.libraries, *_OPENED_LATER]
    _compile(work, _Compiler(npu / "include"), libraries)
    manifest = {
        "soc": profile.soc_name,
        "torch_npu": wheel.version(),
        "hidden": list(hidden),
        "operators": len(operators),
        "libraries": _loading_order(libraries),
        "seconds": round(time.perf_counter() - started, 2),
    }
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _loading_order(needed: Sequence[str]) -> list[str]:
    others = [name for name in needed if name != "libascendcl.so"]
    return ["libascendcl.so", "libopapi.so", *others]


def _write_generated(
    work: Path, profile: HardwareProfile, needs: wheel.Needs, operators: Sequence[str]
) -> None:
    (work / "soc.h").write_text(soc.header(profile))
    (work / "stubs.c").write_text(_stubs(needs.symbols))
    names = ", ".join(f'"{name}"' for name in operators)
    (work / "names.c").write_text(
        '#include "opapi.h"\n'
        f"const char *const emulator_operator_names[] = {{{names}}};\n"
        f"const int emulator_operator_count = {len(operators)};\n"
    )
    text = trampolines.assembly(platform.machine(), operators, needs.max_workspace)
    (work / "trampolines.S").write_text(text)


def _stubs(symbols: Iterable[str]) -> str:
    """Functions that nobody defines: weak, so that the emulated ones take their place."""
    lines = ['#include "acl/acl.h"', '#include "emulator.h"']
    for name in symbols:
        lines.append(
            f'__attribute__((weak)) int {name}_(void) __asm__("{name}");\n'
            f"int {name}_(void)\n"
            "{\n"
            "    return emulator_refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,\n"
            f'                           "{name} is not emulated");\n'
            "}"
        )
    return "\n".join(lines) + "\n"


@attrs.frozen
class _Compiler:
    include: Path
    command: str = attrs.field(factory=lambda: requirements.compiler() or "gcc")

    def run(self, work: Path, *arguments: str) -> None:
        result = subprocess.run(
            [self.command, *arguments], cwd=work, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise BuildError(f"{self.command} {' '.join(arguments)}\n{result.stderr.strip()}")

    def compile(self, work: Path, source: Path) -> str:
        """An object file; the vendor's headers are checked against, not checked themselves."""
        result = f"{source.stem}.o"
        headers = ("-I.", f"-I{_sources()}", "-isystem", str(self.include))
        self.run(work, "-c", *_FLAGS, *headers, str(source), "-o", result)
        return result

    def link(self, work: Path, name: str, *inputs: str) -> None:
        self.run(work, "-shared", "-o", name, f"-Wl,-soname,{name}", *inputs)


def _compile(work: Path, compiler: _Compiler, libraries: Sequence[str]) -> None:
    runtime = [_sources() / f"{name}.c" for name in _RUNTIME] + [work / "stubs.c"]
    operators = [_sources() / f"{name}.c" for name in _OPERATORS]
    operators += [work / "names.c", work / "trampolines.S"]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda path: compiler.compile(work, path), runtime + operators))
    compiler.link(work, "libascendcl.so", *objects[: len(runtime)], "-lpthread")
    # torch_npu looks symbols up through the handles of several libraries, so that each of them
    # must lead to the runtime, used or not.
    uses_runtime = ("-L.", "-Wl,--no-as-needed", "-lascendcl")
    compiler.link(work, "libopapi.so", *objects[len(runtime) :], *uses_runtime)
    for name in libraries:
        if name != "libascendcl.so":
            compiler.link(work, name, *uses_runtime, "-lopapi")
    for leftover in [*objects, "stubs.c", "names.c", "trampolines.S"]:
        (work / leftover).unlink()

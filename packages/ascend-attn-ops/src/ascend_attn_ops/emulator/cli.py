"""Command line of the emulator: run a program on an emulated NPU, look, build beforehand."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import preload, requirements, runtime, soc, wheel
from .builder import MANIFEST, Build, build, cache_folder
from .errors import BuildError, EmulatorError, EmulatorOptionError, EmulatorUnavailableError

DONE, UNAVAILABLE, USAGE = 0, 1, 2
_NOT_FOUND = 127  # as a shell says

_EXAMPLES = """\
examples:
  python -m ascend_attn_ops.emulator run -- python script.py
  python -m ascend_attn_ops.emulator run --soc A5 -- pytest tests/npu
  python -m ascend_attn_ops.emulator run --dump -- python -c "import torch; torch.ones(2).npu()"
  python -m ascend_attn_ops.emulator run --hide aclnnSparseFlashAttentionV2 -- python script.py
  python -m ascend_attn_ops.emulator build --soc Ascend910B3
  python -m ascend_attn_ops.emulator info --json

exit codes: run passes the program's on; otherwise 0 done, 1 the emulator cannot work here,
2 bad usage
"""
_MEMORY_UNITS = {"MIB": 20, "GIB": 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, unless ``run`` replaces this process."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.action(arguments))
    except (EmulatorUnavailableError, BuildError) as error:
        print(f"ascend emulator: {error}", file=sys.stderr)
        return UNAVAILABLE
    except EmulatorError as error:
        print(f"ascend emulator: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_attn_ops.emulator",
        description="An emulated Ascend NPU for torch_npu programs, on a machine without one.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    entry = _command(commands, "build", _build, "build the libraries, or find them in the cache")
    _add_device(entry)
    entry.add_argument("--json", action="store_true", help="as data")
    entry = _command(commands, "info", _info, "whether it can work here, and what it emulates")
    entry.add_argument("--operators", action="store_true", help="list the emulated operators")
    entry.add_argument("--json", action="store_true", help="as data")
    return parser


def _command(commands: Any, name: str, action: Any, text: str) -> argparse.ArgumentParser:
    entry: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    entry.set_defaults(action=action)
    return entry


def _add_device(entry: argparse.ArgumentParser) -> None:
    entry.add_argument("--soc", default="A3", help="A2, A3, A5 or a SoC name; default: A3")
    entry.add_argument(
        "--hide", action="append", default=[], metavar="OPERATOR",
        help="aclnn operator to leave out, as an older CANN would (repeatable)",
    )  # fmt: skip


def _add_run(commands: Any) -> None:
    entry = _command(commands, "run", _run, "run a program, and the Python programs it starts")
    _add_device(entry)
    entry.add_argument("--devices", type=int, default=1, metavar="N", help="NPUs; default: 1")
    entry.add_argument("--memory", type=_memory, metavar="SIZE", help="of each NPU, e.g. 8GiB")
    entry.add_argument(
        "--cann", default=soc.CANN_VERSION, metavar="VERSION",
        help=f"CANN version that torch_npu is told; default: {soc.CANN_VERSION}",
    )  # fmt: skip
    entry.add_argument(
        "--dump", action="store_true", help="print the arguments of operators not emulated"
    )
    entry.add_argument(
        "--calls", metavar="FILE", help="append every operator call to FILE, one JSON object a line"
    )
    entry.add_argument("program", nargs="+", metavar="PROGRAM", help="what to run, after --")


def _memory(text: str) -> int:
    number, unit = text[:-3], _MEMORY_UNITS.get(text[-3:].upper())
    if unit is None or not number.strip().isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: a number with MiB or GiB")
    return int(number) << unit


def _run(arguments: argparse.Namespace) -> int:
    profile = soc.emulated_profile(arguments.soc)
    built = build(profile, hide=arguments.hide)
    options = runtime.options(
        profile, arguments.devices, arguments.memory, arguments.cann, arguments.dump
    )
    if arguments.calls is not None:
        options["calls"] = _appendable(Path(arguments.calls).resolve())
    program = _resolved(arguments.program)
    if shutil.which(program[0]) is None:
        print(f"ascend emulator: {program[0]}: no such program", file=sys.stderr)
        return _NOT_FOUND
    sys.stdout.flush()
    os.execvpe(program[0], program, _environment(built.folder, options))  # noqa: S606


def _appendable(path: Path) -> str:
    try:
        path.open("a").close()
    except OSError as error:
        raise EmulatorOptionError(f"calls: {path} cannot be written ({error})") from error
    return str(path)


def _resolved(program: Sequence[str]) -> list[str]:
    """This Python for ``python``, scripts and pytest: the one that has torch_npu."""
    first, *rest = program
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    if first == "pytest":
        return [sys.executable, "-m", "pytest", *rest]
    return [sys.executable, *program] if first.endswith(".py") else list(program)


def _environment(folder: Path, options: Mapping[str, Any]) -> dict[str, str]:
    start = str(Path(__file__).with_name("site"))
    paths = [start, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        preload.FOLDER_VARIABLE: str(folder),
        preload.OPTIONS_VARIABLE: json.dumps(options),
        preload.QUEUE_VARIABLE: "0",
    }


def _build(arguments: argparse.Namespace) -> int:
    built = build(soc.emulated_profile(arguments.soc), hide=arguments.hide)
    if arguments.json:
        print(json.dumps(_build_data(built), indent=1))
        return DONE
    how = f"built in {built.manifest['seconds']} s" if built.fresh else "found in the cache"
    print(f"{built.manifest['soc']}, torch_npu {built.manifest['torch_npu']}: {how}")
    print(built.folder)
    return DONE


def _build_data(built: Build) -> dict[str, Any]:
    return {**built.manifest, "folder": str(built.folder), "fresh": built.fresh}


def _info(arguments: argparse.Namespace) -> int:
    data = _info_data()
    if arguments.json:
        print(json.dumps(data, indent=1))
        return DONE
    print(f"usable here:  {data['reason'] or 'yes'}")
    print(f"torch_npu:    {data['torch_npu'] or 'not installed'}")
    print(f"compiler:     {data['compiler'] or 'none'}")
    print(f"cache:        {data['cache']}, {len(data['builds'])} builds")
    print(f"operators:    {len(data['operators'])} emulated")
    for device in data["socs"]:
        print(
            f"{device['family'] + ':':<13} {device['soc']}, {device['cube_cores']} cube and "
            f"{device['vector_cores']} vector cores, {device['memory_bytes'] >> 30} GiB"
            f"{'' if device['memory_stated'] else ' (assumed: no source states it)'}"
        )
    if arguments.operators:
        print("\n".join(data["operators"]))
    return DONE


def _info_data() -> dict[str, Any]:
    from .dispatch import load_kernels

    return {
        "reason": requirements.unavailable_reason(),
        "torch_npu": wheel.version() if wheel.folder() else None,
        "compiler": requirements.compiler(),
        "cache": str(cache_folder()),
        "builds": sorted(path.parent.name for path in cache_folder().glob(f"*/{MANIFEST}")),
        "socs": [_soc_data(family) for family in soc.FAMILIES],
        "operators": sorted(load_kernels()),
    }


def _soc_data(family: str) -> dict[str, Any]:
    profile = soc.emulated_profile(family)
    return {
        "family": family,
        "soc": profile.soc_name,
        "cube_cores": profile.cube_cores,
        "vector_cores": profile.vector_cores,
        "memory_bytes": soc.memory_bytes(profile),
        "memory_stated": profile.memory_bytes is not None,
    }

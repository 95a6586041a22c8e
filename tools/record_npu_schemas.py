"""Record the signatures of the torch_npu functions that our providers call.

Reads the registration strings out of the installed wheel's libraries; nothing is loaded or
imported, so it needs neither an NPU nor CANN. The result is data for tests that compare every
provider call with the vendor's signature on machines without torch_npu.

Usage: python tools/record_npu_schemas.py TORCH_NPU_FOLDER [--write]

TORCH_NPU_FOLDER is the installed or unpacked ``torch_npu`` package folder. Without --write the
recorded file is compared with it: exit 1 when they differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
DATA = ROOT / "packages" / "ascend-attn-ops" / "tests" / "data" / "torch_npu_2_13_schemas.json"
LIBRARIES = ("lib/libtorch_npu.so", "lib/libop_plugin_atb.so")


def function_names() -> set[str]:
    """Vendor functions of all ``torch_npu`` providers, from our samples' calls.

    Those of ATB (``_npu_...``) are left out: its library does not hold their signatures as text.
    """
    import ascend_attn_ops as ops

    names = set()
    for op in ops.all_operators():
        build = op.npu_calls.get("torch_npu")
        if build is not None:
            legal = (sample for sample in op.samples() if not sample.rules)
            names |= {build(ops.from_data(op.record, sample.data)).function for sample in legal}
    return {name for name in names if not name.startswith("_npu_")}


def schemas(folder: Path, names: set[str]) -> dict[str, str]:
    """Signature by function name.

    Raises:
        SystemExit: A library is missing or holds no signature for a name.
    """
    found: dict[str, str] = {}
    for library in LIBRARIES:
        path = folder / library
        if not path.is_file():
            raise SystemExit(f"{path} is missing: is this a torch_npu package folder?")
        for name, text in _signatures(path.read_bytes()):
            if name in names:
                found.setdefault(name, text)
    missing = sorted(names - found.keys())
    if missing:
        raise SystemExit(f"{folder} holds no signature of {', '.join(missing)}")
    return dict(sorted(found.items()))


def _signatures(blob: bytes) -> Iterator[tuple[str, str]]:
    for match in re.finditer(rb"(?<=\0)(?:\w+::)?(_?npu_\w+(?:\.out)?)\([^\0]*\) -> [^\0]+", blob):
        text = match.group().decode("ascii", "replace")
        try:
            schema = torch._C.parse_schema(text)
        except RuntimeError:  # the Python argument parser's dialect of the same signature
            continue
        yield match.group(1).decode(), str(schema)


def main() -> int:
    """Compare, or write with --write; exit 1 when they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_raw())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = json.dumps(schemas(arguments.folder, function_names()), indent=1) + "\n"
    if arguments.write:
        DATA.parent.mkdir(parents=True, exist_ok=True)
        DATA.write_text(text)
        return 0
    return int(not DATA.is_file() or DATA.read_text() != text)


def _raw() -> type[argparse.HelpFormatter]:
    return argparse.RawDescriptionHelpFormatter


if __name__ == "__main__":
    sys.exit(main())

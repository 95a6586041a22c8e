"""Run `ascend-vllm` several times in one process: `cli_probe.py JOB_FILE RESULT_FILE`.

The job is JSON: `commands`, each with a `name` and `arguments`. The result has, for each, the exit
code and what went to standard output and standard error. Loading vLLM takes longer than all else,
hence one process; it starts as a command does, without vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def output(number: int) -> Iterator[BinaryIO]:
    """Send what goes to a file descriptor to a file; vLLM uses the descriptor itself."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(number)
        os.dup2(file.fileno(), number)
        try:
            yield file
        finally:
            (sys.stdout if number == 1 else sys.stderr).flush()
            os.dup2(before, number)
            os.close(before)


def run(arguments: list[str]) -> dict[str, Any]:
    """Exit code and output of a command."""
    from ascend_vllm_plugin.cli import main

    with output(1) as out, output(2) as err:
        try:
            code: Any = main(arguments)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"code": code, "out": texts[0], "err": texts[1]}


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result = {command["name"]: run(command["arguments"]) for command in job["commands"]}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

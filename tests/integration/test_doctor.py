"""`ascend-vllm doctor` on this machine: real vLLM finds its platform, and nothing is replaced."""

from __future__ import annotations

import json
from subprocess import CompletedProcess
from typing import Any

import pytest
from engines import environment, run_python

pytestmark = pytest.mark.engine

SIMULATED = "takes ascend_vllm_plugin.simulated_platform.SimulatedAscendPlatform"


def doctor(*arguments: str, **variables: str) -> CompletedProcess[str]:
    """The command in a process of its own."""
    command = ["-m", "ascend_vllm_plugin", "doctor", *arguments]
    return run_python(command, environment(simulate=True, **variables))


def findings(done: CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Subject -> what was found; no subject has two findings."""
    rows = json.loads(done.stdout)
    found = {row["subject"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_machine_that_simulates_is_in_order() -> None:
    done = doctor("--json", ASCEND_HWPROFILE="A3")
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(done)
    assert {row["status"] for row in found.values()} == {"ok", "note"}
    subjects = ("vLLM", "mode", "profile", "platform plugins", "provider cpu", "start of vLLM")
    assert [found[subject]["status"] for subject in subjects] == ["ok"] * len(subjects)
    assert found["profile"]["found"].endswith("(A3)")
    assert found["start of vLLM"]["found"] == SIMULATED


def test_a_variable_that_leads_vllm_past_the_plugin_is_a_problem() -> None:
    done = doctor("--json", VLLM_PLUGINS="lora_filesystem_resolver")
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(done)
    problems = {subject for subject, row in found.items() if row["status"] == "problem"}
    assert problems == {"VLLM_PLUGINS"}
    assert found["VLLM_PLUGINS"]["found"] == "'lora_filesystem_resolver' leaves the plugin out"
    assert "start of vLLM" not in found  # vLLM is not asked while something stands in the way

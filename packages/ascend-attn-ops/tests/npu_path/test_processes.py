"""Whole processes under ``emulator run`` and ``pytest --ascend-emulator``; once, on A3."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_attn_ops.emulator import Emulator, cli

GUIDE = Path(__file__).parents[4] / "docs" / "emulator.md"
TIMEOUT = 240


@pytest.fixture(autouse=True)
def once(family: str) -> None:
    if family != "A3":
        pytest.skip("the command line does not depend on the SoC; tested on A3")


def clean_environment() -> dict[str, str]:
    """Without what an outer ``emulator run`` may have set."""
    dropped = ("ASCEND_EMULATOR_LIBRARIES", "ASCEND_EMULATOR_OPTIONS", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def emulated(*arguments: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ascend_attn_ops.emulator", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env={**clean_environment(), **extra}, cwd=cwd,
    )  # fmt: skip


def test_the_script_of_the_guide_runs(npu: Emulator, tmp_path: Path) -> None:
    if not GUIDE.is_file():
        pytest.skip("docs/emulator.md is not part of the package")
    script = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    (tmp_path / "script.py").write_text(script + "\nraise SystemExit(7)\n")
    calls = tmp_path / "calls.jsonl"
    arguments = ("run", "--calls", str(calls), "--", "python", "script.py")
    result = emulated(*arguments, cwd=tmp_path)
    assert result.returncode == 7, result.stderr
    assert f"attention on {npu.profile.soc_name} gives (2, 4, 128) torch.bfloat16" in result.stdout
    sums = re.search(r"add up to \[(.*)\]", result.stdout)
    assert sums is not None
    assert [float(part) for part in sums[1].split(",")] == pytest.approx([1.0] * 4)
    seen = [json.loads(line)["operator"] for line in calls.read_text().splitlines()]
    assert {"aclnnMatmul", "aclnnSoftmax", "aclnnFusedInferAttentionScoreV3"} <= set(seen)


OLDER_CANN = """
import concurrent.futures
import multiprocessing
import torch

def device_of_child(queue):
    queue.put(torch.npu.get_device_name())

def failure(function):
    try:
        function(torch.ones(3, device="npu"))
    except RuntimeError as error:
        return str(error).splitlines()[-1]

def products(number):
    found = []
    with torch.npu.stream(torch.npu.Stream()):
        for _ in range(20):
            square = torch.full((8, 8), float(number), device="npu")
            found.append((square @ square).sum().item() == 512 * number**2)
    return all(found)

if __name__ == "__main__":
    with concurrent.futures.ThreadPoolExecutor(6) as pool:  # they make the first calls
        print("threads", list(pool.map(products, range(1, 7))))
    print("devices", torch.npu.device_count(), torch.npu.get_device_properties(0).total_memory)
    print(failure(lambda x: x.softmax(-1)))
    print(failure(torch.nn.functional.hardswish))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=device_of_child, args=(queue,))
    child.start()
    print("child sees", queue.get(timeout=120))
    child.join(60)
"""


def test_options_reach_the_program_and_its_children(npu: Emulator, tmp_path: Path) -> None:
    """And a sitecustomize of the user runs after ours, before torch is imported."""
    (tmp_path / "program.py").write_text(OLDER_CANN)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; print('ours ran', 'torch' in sys.modules)\n"
    )
    arguments = ("--soc", "A3", "--hide", "aclnnSoftmax", "--devices", "2", "--memory", "1GiB")
    result = emulated(
        "run", *arguments, "--dump", "--", "program.py", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert result.returncode == 0, result.stderr
    assert f"threads {[True] * 6}" in result.stdout
    assert f"devices 2 {1 << 30}" in result.stdout
    assert "operator SoftmaxV2 has no aclnn form" in result.stdout  # what torch_npu tries instead
    assert "aclnnHardswish is not emulated" in result.stdout
    assert "aclnnHardswish(tensor(dtype 0, format 2, [3]), tensor(dtype 0" in result.stderr
    assert f"child sees {npu.profile.soc_name}" in result.stdout
    assert result.stdout.count("ours ran False") >= 3  # the command itself, program and child


def test_a_program_never_runs_without_the_device_that_was_asked_for(tmp_path: Path) -> None:
    """Python goes on after an error at its start; below the emulator that would hide the loss."""
    start = Path(cli.__file__).with_name("site")
    lost = {"ASCEND_EMULATOR_LIBRARIES": str(tmp_path / "gone"), "ASCEND_EMULATOR_OPTIONS": "{}"}
    result = subprocess.run(
        [sys.executable, "-c", "print('ran')"], capture_output=True, text=True, timeout=TIMEOUT,
        check=False, env={**clean_environment(), **lost, "PYTHONPATH": str(start)},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("ascend emulator: FileNotFoundError: ")


def test_a_typing_error_does_not_skip_the_tests(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_fixture(ascend_emulator):\n    pass\n")
    wrong = "--ascend-emulator-hide=aclnnSoftmacs"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--ascend-emulator=A3", wrong],
        capture_output=True, text=True, timeout=TIMEOUT, check=False, env=clean_environment(),
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "calls no aclnnSoftmacs" in result.stderr


TESTS = """

def test_fixture(ascend_emulator):
    assert ascend_emulator.profile.family.value == "A3"

def test_plain():
    pass
"""


@pytest.mark.skipif(not GUIDE.is_file(), reason="docs/emulator.md is not part of the package")
def test_the_plugin_works_in_the_workers_of_xdist(npu: Emulator, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    examples = next(block for block in blocks if "ascend_npu" in block)
    (tmp_path / "test_them.py").write_text(examples + TESTS)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider",
         "--ascend-emulator=A3"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env=clean_environment(), cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 passed" in result.stdout
    assert f"ascend emulator: {npu.profile.soc_name}" in result.stdout

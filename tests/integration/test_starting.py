"""What vLLM does at its start: stays alone unless asked, and refuses what cannot work."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from engines import environment, run_python
from tiny_models import make_mla_config

from ascend_vllm_plugin.compat import installed_vllm

pytestmark = pytest.mark.engine

QUICK = """
import gc
gc.disable()
"""
"""Collecting garbage is a quarter of the time that importing vLLM takes."""

PLATFORM = """
from vllm.platforms import current_platform
import sys
print(type(current_platform).__module__, type(current_platform).__qualname__)
print(sorted(name for name in sys.modules if name.startswith("ascend_vllm_plugin.")))
"""

ENGINE = """
import sys
from vllm import LLM
LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
    max_model_len=128, max_num_seqs=2)
"""

OTHER_RANGE = """
from packaging.specifiers import SpecifierSet
from ascend_vllm_plugin import compat
compat.SUPPORTED_VLLM = SpecifierSet(">=0.99")
"""

RIVAL = """
import sys, types
from importlib import metadata
module = types.ModuleType("some_rival")
module.register = lambda: "vllm.platforms.cpu.CpuPlatform"
sys.modules["some_rival"] = module
theirs = metadata.EntryPoint("ascend", "some_rival:register", "vllm.platform_plugins")
found = metadata.entry_points

def with_theirs(**wanted):
    entries = found(**wanted)
    group = wanted.get("group")
    return metadata.EntryPoints((*entries, theirs)) if group == theirs.group else entries

metadata.entry_points = with_theirs
"""
"""A second platform plugin, named as vllm-ascend's is, that wants every vLLM."""

SIMULATE = environment(simulate=True)
STARTS = {
    "not asked": (PLATFORM, environment(simulate=False)),
    "asked": (PLATFORM, SIMULATE),
    "unknown profile": (ENGINE, {**SIMULATE, "ASCEND_HWPROFILE": "A9"}),
    "unknown switch": (ENGINE, {**SIMULATE, "ASCEND_VLLM_SIMULATE": "yes"}),
    "unsupported vLLM": (OTHER_RANGE + ENGINE, SIMULATE),
    "bypassed plugin": (ENGINE, {**SIMULATE, "VLLM_TARGET_DEVICE": "cpu"}),
    "second plugin": (RIVAL + ENGINE, SIMULATE),
    "second plugin kept out": (
        RIVAL + PLATFORM,
        {**SIMULATE, "VLLM_PLUGINS": "ascend_vllm"},
    ),
    "small latents": (ENGINE, SIMULATE),
}
"""Name -> what runs, and in which environment."""


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess[str]]:
    """All starts, two at a time: they spend their time importing vLLM."""
    model: Path = make_mla_config(tmp_path_factory.mktemp("mla"), kv_lora_rank=256)
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = {
            name: pool.submit(run_python, ["-c", QUICK + code, str(model)], env)
            for name, (code, env) in STARTS.items()
        }
        return {name: start.result() for name, start in running.items()}


def test_vllm_keeps_its_own_platform_unless_asked(
    starts: dict[str, CompletedProcess[str]],
) -> None:
    done = starts["not asked"]
    assert done.returncode == 0, done.stderr
    platform, modules = done.stdout.strip().splitlines()[-2:]
    assert platform == "vllm.platforms.cpu CpuPlatform"
    assert "'ascend_vllm_plugin.registration'" in modules
    for module in ("simulated_platform", "worker", "adapters.standard"):
        assert f"'ascend_vllm_plugin.{module}'" not in modules


def test_vllm_takes_our_platform_when_asked(starts: dict[str, CompletedProcess[str]]) -> None:
    done = starts["asked"]
    assert done.returncode == 0, done.stderr
    platform = done.stdout.strip().splitlines()[-2]
    assert platform == "ascend_vllm_plugin.simulated_platform SimulatedAscendPlatform"


def test_a_second_platform_plugin_is_kept_out_as_the_message_says(
    starts: dict[str, CompletedProcess[str]],
) -> None:
    done = starts["second plugin kept out"]
    assert done.returncode == 0, done.stderr
    platform = done.stdout.strip().splitlines()[-2]
    assert platform == "ascend_vllm_plugin.simulated_platform SimulatedAscendPlatform"


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("unknown profile", "UnknownSocError: unknown SoC 'A9'"),
        (
            "unknown switch",
            "EnvironmentVariableError: environment variable ASCEND_VLLM_SIMULATE='yes': "
            "allowed is 1 (simulate) or 0 (do nothing)",
        ),
        ("unsupported vLLM", f"UnsupportedVllmError: vLLM {installed_vllm()} is installed"),
        (
            "second plugin",
            "PlatformConflictError: two platform plugins want this vLLM: this one and ascend "
            "(some_rival:register). Set VLLM_PLUGINS=ascend_vllm",
        ),
        (
            "bypassed plugin",
            "SimulationUnavailableError: ASCEND_VLLM_SIMULATE=1 has no effect: vLLM took the "
            "platform vllm.platforms.cpu.CpuPlatform",
        ),
    ],
)
def test_a_start_that_cannot_work_fails_with_one_clear_error(
    start: str, message: str, starts: dict[str, CompletedProcess[str]]
) -> None:
    done = starts[start]
    assert done.returncode == 1
    assert message in done.stderr
    assert "Starting to load model" not in done.stdout + done.stderr


def test_a_model_that_no_backend_takes_is_refused_before_its_weights(
    starts: dict[str, CompletedProcess[str]],
) -> None:
    done = starts["small latents"]
    assert done.returncode == 1
    message = done.stderr[done.stderr.rindex("NoBackendError") :]
    assert re.search(r"standard +refused", message)
    assert "use_mla: found True; allowed: False [standard.use_mla;" in message
    # The folder holds no weights: vLLM would have complained of that.
    assert "safetensors" not in done.stderr

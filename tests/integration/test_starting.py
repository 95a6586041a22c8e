"""What vLLM does at its start: stays alone unless asked, and refuses what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import environment, run_python
from tiny_models import make_mla_config

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


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return make_mla_config(tmp_path_factory.mktemp("mla"))


def test_vllm_keeps_its_own_platform_unless_asked() -> None:
    done = run_python(["-c", PLATFORM], environment(simulate=False))
    assert done.returncode == 0, done.stderr
    first, modules = done.stdout.strip().splitlines()[-2:]
    assert first == "vllm.platforms.cpu CpuPlatform"
    assert "ascend_vllm_plugin.registration" in modules
    for module in ("simulated_platform", "worker", "adapters.standard"):
        assert f"ascend_vllm_plugin.{module}'" not in modules


def test_vllm_takes_our_platform_when_asked() -> None:
    done = run_python(["-c", PLATFORM], environment(simulate=True))
    assert done.returncode == 0, done.stderr
    first = done.stdout.strip().splitlines()[-2]
    assert first == "ascend_vllm_plugin.simulated_platform SimulatedAscendPlatform"


@pytest.mark.parametrize(
    ("variables", "setup", "message"),
    [
        ({"ASCEND_HWPROFILE": "A9"}, "", "UnknownSocError: unknown SoC 'A9'"),
        (
            {"ASCEND_VLLM_SIMULATE": "yes"},
            "",
            "EnvironmentVariableError: environment variable ASCEND_VLLM_SIMULATE='yes'",
        ),
        ({}, OTHER_RANGE, "UnsupportedVllmError: vLLM 0.30.0 is installed"),
        (
            {"VLLM_TARGET_DEVICE": "cpu"},
            "",
            "SimulationUnavailableError: ASCEND_VLLM_SIMULATE=1 has no effect: vLLM took the "
            "platform vllm.platforms.cpu.CpuPlatform",
        ),
    ],
    ids=["unknown profile", "unknown switch", "unsupported vLLM", "bypassed plugin"],
)
def test_a_start_that_cannot_work_fails_with_one_clear_error(
    variables: dict[str, str], setup: str, message: str, mla: Path
) -> None:
    done = run_python(["-c", setup + ENGINE, str(mla)], environment(simulate=True, **variables))
    assert done.returncode == 1
    assert message in done.stderr.strip().splitlines()[-1]
    assert "Starting to load model" not in done.stdout + done.stderr


def test_a_model_that_no_backend_takes_is_refused_before_its_weights(mla: Path) -> None:
    done = run_python(["-c", ENGINE, str(mla)], environment(simulate=True))
    assert done.returncode == 1
    message = done.stderr[done.stderr.rindex("NoBackendError") :]
    assert "MLA" in message or "mla" in message
    assert "standard.use_mla" in message
    # The folder holds no weights: vLLM would have complained of that.
    assert "safetensors" not in done.stderr

"""DFlash2 on the V1 runner: the patch is needed, and chooses what vLLM's V2 speculator chooses."""

from __future__ import annotations

from typing import Any

import pytest
from engines import environment, run_script

from ascend_vllm_plugin.compat import SINCE_0_31, require_supported_vllm
from ascend_vllm_plugin.patches.dflash2_on_v1 import REFUSALS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("walk")
    env = environment(simulate=True, VLLM_USE_V2_MODEL_RUNNER="1")
    return dict(run_script("walk_probe.py", {}, folder, env)[0])


def test_the_v1_runner_still_refuses_dflash2(probed: dict[str, Any]) -> None:
    """When this fails, vLLM drafts with DFlash2 on V1: drop the patch `dflash2_on_v1`."""
    assert probed["stock"] == {"value": [REFUSALS[require_supported_vllm() in SINCE_0_31]]}
    assert probed["patched"] == {"value": []}
    assert probed["another"] == probed["stock"]  # control: a draft that the patch does not serve


def test_the_interpreter_still_refuses_the_kernels_mask(probed: dict[str, Any]) -> None:
    """When this fails, the interpreter takes any mask: drop the patch `interpreter_masks`."""
    assert "mask has unsupported dtype" in probed["stock masks"]["error"]


def test_the_walk_on_v1_is_that_of_the_v2_kernel(probed: dict[str, Any]) -> None:
    assert probed["kernel"] == {"value": probed["walk"]}
    assert len({tuple(tokens) for tokens in probed["walk"]}) > 1

"""The overlay base on a recorded stand-in of vllm-ascend, found by vLLM as an installed one is.

It shows what the overlay asks and replaces; with vllm-ascend itself it has not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ascend_vllm_plugin.compat import installed_vllm
from ascend_vllm_plugin.npu.base import same_minor

pytestmark = pytest.mark.timeout(1200)  # a busy machine takes minutes to import vLLM

HERE = Path(__file__).parent
STAND_IN = "0.30.0"
ALLOWED = {"VLLM_PLUGINS": "ascend_kv_connector,ascend_vllm"}
STARTS: Mapping[str, Mapping[str, str]] = {
    "overlay": ALLOWED,
    "beside": {},
    "misfit": {**ALLOWED, "STAND_IN_LACKS": "set_device"},
}
"""Name -> variables that the user has set."""


@pytest.fixture(scope="module")
def starts(npu: Any, model: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """All of them, two at a time: they spend their time importing vLLM."""
    if npu.profile.family.value != "A3":
        pytest.skip("the overlay does not depend on the product: tested on A3")
    if not same_minor(STAND_IN, installed_vllm() or "0"):
        pytest.skip(f"the stand-in is of vllm-ascend {STAND_IN}, vLLM is {installed_vllm()}")

    def start(variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        paths = [os.environ["PYTHONPATH"], str(HERE / "stand_in")]
        return subprocess.run(
            [sys.executable, str(HERE / "overlay_probe.py"), str(model)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(STARTS, pool.map(start, STARTS.values()), strict=True))


@pytest.fixture(scope="module")
def overlay(starts: dict[str, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    done = starts["overlay"]
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_vllm_takes_a_subclass_of_its_platform(overlay: dict[str, Any]) -> None:
    assert overlay["platform"] == "ascend_vllm_plugin.npu.overlay.OverlayAscendPlatform"
    assert overlay["bases"] == [
        "vllm_ascend.platform.NPUPlatform",
        "vllm.platforms.interface.Platform",
    ]


def test_what_is_not_attention_stays_its_own(overlay: dict[str, Any]) -> None:
    assert overlay["worker"] == "vllm_ascend.worker.worker.NPUWorker"
    assert overlay["graphs"] == "vllm_ascend.compilation.acl_graph.ACLGraphWrapper"
    assert overlay["quantization"] == ["ascend"]
    assert overlay["communicator"].startswith("vllm_ascend.distributed.")


def test_attention_is_ours_where_we_take_it(overlay: dict[str, Any]) -> None:
    """And where the user names one, or no backend of ours takes the layer, its own."""
    assert overlay["backends"] == {
        "dense": "ascend_vllm_plugin.npu.backends.OverlayStandardBackend",
        "latent": "vllm_ascend.attention.mla_v1.AscendMLABackend",
        "quantised": "vllm_ascend.attention.attention_v1.AscendAttentionBackend",
        "named": "vllm_ascend.attention.fa3_v1.AscendFABackend",
    }


def test_its_worker_can_be_asked_for_the_routing(overlay: dict[str, Any]) -> None:
    from ascend_vllm_plugin.report import RoutingReport

    assert overlay["extension"] == f"{RoutingReport.__module__}.{RoutingReport.__qualname__}"
    own = {name for name in dir(RoutingReport) if not name.startswith("__")}
    assert own == {"routing"}  # vLLM refuses extensions that hide what a worker has


def test_the_log_says_which_base_and_why(
    starts: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    log = starts["overlay"].stdout + starts["overlay"].stderr
    assert (
        "NPU mode, overlay base (vllm-ascend 0.30.0 for vLLM 0.30.0 is installed and fits), on "
        "emulated CANN, no NPU" in log
    )
    assert "attention by vllm-ascend, vllm_ascend.attention.mla_v1.AscendMLABackend:" in log
    assert "attention by ascend_vllm_plugin.npu.backends.OverlayStandardBackend" in log


def test_nobody_who_did_not_ask_is_taken_over(
    starts: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    """Both plugins are there and nothing is set: vLLM keeps vllm-ascend's, and is told how."""
    done = starts["beside"]
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["platform"] == "vllm_ascend.platform.NPUPlatform"
    assert found["backends"]["dense"] == "vllm_ascend.attention.attention_v1.AscendAttentionBackend"
    said = done.stdout + done.stderr
    assert "two platform plugins want this vLLM: this one and ascend (vllm_ascend:register)" in said
    assert "Set VLLM_PLUGINS=ascend_kv_connector,ascend_vllm" in said


def test_a_vllm_ascend_that_does_not_fit_is_one_clear_error(
    starts: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = starts["misfit"]
    assert done.returncode == 1
    said = done.stderr[done.stderr.rindex("NpuBaseRefusedError") :]
    assert "no overlay on vllm-ascend: vllm-ascend 0.30.0 for vLLM 0.30.0 does not fit" in said
    assert "  NPUPlatform.set_device is missing" in said
    assert "Set ASCEND_VLLM_NPU=standalone to run without it" in said

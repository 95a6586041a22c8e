"""Tests of NPU mode on an emulated NPU.

    python -m ascend_attn_ops.emulator run --soc A3 -- pytest tests/npu_path

Below `emulator run` because vLLM starts Python processes, to look at a model's class for example,
and these must find the emulated NPU, too. Without it, or without vLLM, the tests are skipped with
the reason. vLLM is imported inside fixtures and tests, after that has been found out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = "ASCEND_EMULATOR_LIBRARIES"
NO_EMULATOR = (
    "no emulated NPU: run it below `python -m ascend_attn_ops.emulator run --soc A3 -- pytest ...`"
)
MEMORY = 512 << 20
"""Bytes of the emulated NPU: vLLM takes what it finds."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The emulated NPU of this session, small enough for a KV cache that takes nearly all of it."""
    if not os.environ.get(LIBRARIES):
        pytest.skip(NO_EMULATOR)
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    found = import_module("ascend_attn_ops.emulator").current()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        found.set_memory(MEMORY)
        yield found


@pytest.fixture(autouse=True)
def _judged(npu: Any, _no_variables_of_ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile that the platform has named, which the fixture above hides from a test."""
    monkeypatch.setenv("ASCEND_HWPROFILE", npu.profile.soc_name)


@pytest.fixture(scope="session")
def model(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny Llama."""
    from npu_path import tiny_llama

    return tiny_llama.make(tmp_path_factory.mktemp("llama"))

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=10, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ASCEND_VLLM_SIMULATE",
        "ASCEND_VLLM_NPU",
        "ASCEND_VLLM_ROUTING_FILE",
        "ASCEND_HWPROFILE",
        "ASCEND_ATTN_PROVIDER",
    ):
        monkeypatch.delenv(name, raising=False)

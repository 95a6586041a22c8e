import pytest


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_VLLM_SIMULATE", "ASCEND_VLLM_ROUTING_FILE", "ASCEND_HWPROFILE"):
        monkeypatch.delenv(name, raising=False)

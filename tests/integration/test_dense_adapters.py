"""The adapters of dense backends beside the standard one: who gets them, and what they refuse."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from test_adapter import config, question
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config

from ascend_attn_backends import NoBackendError
from ascend_vllm_plugin import LayerRefusedError, facts, selection
from ascend_vllm_plugin.adapters.fa3 import FABackend, FAImpl
from ascend_vllm_plugin.adapters.layer import layer_request
from ascend_vllm_plugin.adapters.standard import StandardBackend
from ascend_vllm_plugin.adapters.standard_dcp import StandardDcpBackend, StandardDcpImpl

pytestmark = pytest.mark.engine

ARGUMENTS = {"num_heads": 2, "head_size": 64, "scale": 0.125, "num_kv_heads": 1}
TRAINING = {"ascend": {"training_consistency": True}}


@pytest.fixture(autouse=True)
def a5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", "A5")


def asked(additional: dict[str, Any] | None = None, graphs: str = "NONE", **parallel: int) -> Any:
    """A configuration of an engine."""
    found = config()
    found.additional_config = additional or {}
    found.compilation_config.cudagraph_mode = CUDAGraphMode[graphs]
    vars(found.parallel_config).update(parallel)
    return found


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        (asked(), StandardBackend),
        (asked(TRAINING), FABackend),
        (asked(TRAINING, graphs="PIECEWISE"), FABackend),
        (asked(decode_context_parallel_size=2), StandardDcpBackend),
    ],
)
def test_selection_finds_the_adapter(engine: Any, backend: type) -> None:
    route = selection.select(question(), engine, None)
    assert route.class_path == f"{backend.__module__}.{backend.__qualname__}"


@pytest.mark.parametrize(
    ("engine", "changes", "rule"),
    [
        (asked(TRAINING), {"has_sliding_window": True}, "fa3.sliding_window"),
        (asked(TRAINING, graphs="FULL_DECODE_ONLY"), {}, "fa3.graph_mode"),
        (asked(TRAINING, decode_context_parallel_size=2), {}, "fa3.context_parallel_size"),
        (asked(TRAINING), {"use_mla": True, "head_size": 576}, "mla.training_consistency"),
        (
            asked(decode_context_parallel_size=2),
            {"has_sliding_window": True},
            "standard_dcp.sliding_window",
        ),
        (
            asked(prefill_context_parallel_size=2),
            {},
            "standard_dcp.prefill_context_parallel_size",
        ),
    ],
)
def test_selection_refuses_with_the_rule(engine: Any, changes: dict[str, Any], rule: str) -> None:
    """Nobody computes something else instead."""
    backend, parameter = rule.split(".")
    pattern = rf"(?m)^  {backend} +refused\n(    .*\n)*? +{parameter}: found "
    with pytest.raises(NoBackendError, match=pattern):
        selection.select(question(**changes), engine, None)


@pytest.mark.parametrize(
    ("mode", "eager", "expected"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, False, "full_and_piecewise"),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True, "none"),
        (CUDAGraphMode.PIECEWISE, False, "piecewise"),
        (CUDAGraphMode.NONE, False, "none"),
        (None, False, "none"),
    ],
)
def test_what_the_engine_captures(mode: Any, eager: bool, expected: str) -> None:
    engine = config()
    engine.compilation_config.cudagraph_mode = mode
    engine.model_config.enforce_eager = eager
    assert facts.request_from(question(), engine, None).graph_mode == expected


def test_fa3_refuses_vllms_cache_on_a_product() -> None:
    with set_current_vllm_config(VllmConfig(additional_config=TRAINING)):
        impl = FAImpl(**ARGUMENTS)
        request = layer_request(head_size=64, num_heads=2, num_kv_heads=1)
    assert impl.further_refusals(request) == []
    (refusal,) = impl.further_refusals(attrs.evolve(request, provider="torch_npu"))
    assert str(refusal).startswith("kv_cache: found vLLM's, whose rows hold a key and its value")


def test_shared_keys_need_the_v2_runner() -> None:
    engine = VllmConfig()
    engine.parallel_config.decode_context_parallel_size = 2
    with (
        set_current_vllm_config(engine),
        pytest.raises(LayerRefusedError, match=r"runner: found v1; allowed: v2 \(VLLM_USE_V2"),
    ):
        StandardDcpImpl(**ARGUMENTS)


def test_what_vllm_asks_of_shared_keys() -> None:
    assert StandardDcpBackend.supports_dcp()
    assert not StandardBackend.supports_dcp()
    assert StandardDcpImpl.can_return_lse_for_decode

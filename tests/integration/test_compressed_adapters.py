"""The adapter of DeepSeek-V4: what is refused before weights are read, and the patch behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_adapter import common
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.models.deepseek_v4.cpu import model
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from ascend_attn_backends import AscendDSAMetadata, NoBackendError
from ascend_vllm_plugin import compat, selection, worker
from ascend_vllm_plugin.adapters.dsa import CompressedAttention, model_refusals
from ascend_vllm_plugin.adapters.dsa_caches import CacheStepBuilder, DSABackend
from ascend_vllm_plugin.adapters.layer import layer_request
from ascend_vllm_plugin.errors import ModelRefusedError
from ascend_vllm_plugin.patches import compressed_attention

pytestmark = pytest.mark.engine

LAYER: dict[str, Any] = {
    "use_mla": True,
    "use_compress": True,
    "head_size": 512,
    "num_heads": 4,
    "num_kv_heads": 1,
    "sliding_window": 128,
    "has_sinks": True,
    "compress_ratio": 4,
    "compressed_top_k": 512,
}


def route(**parallel: int) -> selection.Route:
    """The route of a layer that vLLM builds in half precision."""
    engine = VllmConfig()
    vars(engine.parallel_config).update(parallel)
    torch.set_default_dtype(torch.float16)
    try:
        with set_current_vllm_config(engine):
            return selection.route_of(layer_request(**LAYER))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("profile", ["A3", "A5"])
def test_compressed_layers_take_dsa(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", profile)
    found = route()
    assert found.class_path == f"{DSABackend.__module__}.{DSABackend.__qualname__}"


@pytest.mark.parametrize(
    ("profile", "parallel", "message"),
    [
        ("A2", {}, "a product with DSA"),
        ("A5", {"decode_context_parallel_size": 2}, "backend: found dsa_dcp; allowed: backends"),
        ("A5", {"prefill_context_parallel_size": 2}, r"prefill_context_parallel_size: found 2;"),
    ],
)
def test_other_engines_are_refused_with_the_rule(
    profile: str, parallel: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", profile)
    with pytest.raises(NoBackendError, match=message):
        route(**parallel)


def engine(**changes: Any) -> Any:
    """What an engine that vLLM's model takes says."""
    plain = {"dtype": torch.float16, "quantization": None, "connector": None, "ranks": 1}
    fields = {**plain, **changes}
    transfer = fields["connector"] and SimpleNamespace(kv_connector=fields["connector"])
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=fields["dtype"], quantization=fields["quantization"]),
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(decode_context_parallel_size=fields["ranks"]),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "dtype: found float32; allowed: float16 or bfloat16: vLLM's"),
        ({"quantization": "deepseek_v4_fp8"}, "quantization: found deepseek_v4_fp8; allowed: none"),
        ({"ranks": 2}, "decode_context_parallel_size: found 2; allowed: 1: vLLM keeps no sliding"),
        ({"connector": "NixlConnector"}, "kv_connector: found NixlConnector; allowed: none"),
    ],
)
def test_what_vllms_model_does_not_take(changes: dict[str, Any], message: str) -> None:
    assert model_refusals(engine()) == []
    (refusal,) = model_refusals(engine(**changes))
    assert str(refusal).startswith(message)


def test_vllm_still_keeps_no_sliding_window_where_ranks_share_keys() -> None:
    """Else the backend dsa_dcp may have an adapter: judge the refusal again."""
    config = VllmConfig()
    config.parallel_config.decode_context_parallel_size = 2
    window = SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=512, dtype=torch.float16, sliding_window=128
    )
    with pytest.raises(AssertionError, match="DCP not support sliding window"):
        window.max_memory_usage_bytes(config)


def test_layers_of_one_kind_build_their_metadata_once() -> None:
    step = CacheStepBuilder(block_size=128).build(SimpleNamespace())
    built: list[AscendDSAMetadata] = []

    def build() -> Any:
        built.append(SimpleNamespace())
        return built[-1]

    first, again, other = step.once("kind", build), step.once("kind", build), step.once(4, build)
    assert first is again is not other
    assert len(built) == 2


def test_the_patch_puts_our_layer_into_vllms_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "DeepseekV4CPUAttention", DeepseekV4CPUAttention)
    assert compressed_attention.apply()
    assert model.DeepseekV4CPUAttention is CompressedAttention


def test_the_patch_is_still_needed() -> None:
    """Every builder of vLLM's for this model asks for this, and it is a Triton kernel."""
    with pytest.raises(TypeError, match="not subscriptable"):  # else: judge the patch again
        common().token_to_req_indices(torch.zeros(8, dtype=torch.int32))


def test_a_model_whose_kernels_this_processor_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "MODEL_KERNELS", {"deepseek_v4": ("no_such_kernel",)})
    message = r"deepseek_v4 calls no_such_kernel, which vLLM's .* allowed: a processor with AVX-512"
    with pytest.raises(ModelRefusedError, match=message):
        worker.require_model_kernels("deepseek_v4")
    worker.require_model_kernels("llama")

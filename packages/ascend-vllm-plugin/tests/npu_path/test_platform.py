"""The standalone platform on an emulated NPU: what vLLM is told, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascend_vllm_plugin.compat import installed_vllm

pytestmark = pytest.mark.timeout(1200)  # a busy machine takes minutes to import vLLM


@pytest.fixture(scope="module")
def platform(npu: Any) -> Any:
    """vLLM's platform, as vLLM finds it."""
    from vllm.platforms import current_platform

    return current_platform


def configuration(model: Path, **engine: Any) -> Any:
    """The engine's configuration, which asks the platform."""
    from vllm import EngineArgs

    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=256, **engine
    ).create_engine_config()


def test_vllm_finds_the_platform_by_itself(platform: Any) -> None:
    from ascend_vllm_plugin import compat, register_general
    from ascend_vllm_plugin.npu.base import PLATFORMS

    assert compat.current_platform_path() == PLATFORMS["standalone"]
    assert (platform.device_type, platform.dispatch_key) == ("npu", "PrivateUse1")
    assert platform.is_out_of_tree()
    register_general()


def test_the_facts_are_those_of_the_device(platform: Any, npu: Any) -> None:
    assert platform.get_device_name() == npu.profile.soc_name
    assert platform.num_compute_units() == npu.profile.cube_cores
    assert platform.get_device_total_memory() == npu.options["memory_bytes"]


def test_the_configuration_is_one_for_cann(model: Path) -> None:
    from vllm.config import CompilationMode, CUDAGraphMode

    found = configuration(model, dtype="bfloat16")
    assert (
        found.parallel_config.worker_cls == "ascend_vllm_plugin.npu.worker.StandaloneAscendWorker"
    )
    assert found.cache_config.block_size == 128
    assert found.compilation_config.mode == CompilationMode.NONE
    assert found.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert not found.use_v2_model_runner


def test_what_the_user_named_stays(model: Path) -> None:
    found = configuration(model, block_size=32, worker_cls="somebody.Worker")
    assert found.cache_config.block_size == 32
    assert found.parallel_config.worker_cls == "somebody.Worker"


LORA = {"enable_lora": True, "max_lora_rank": 8}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
MODEL_DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"quantization": "fp8"}, "quantization: found fp8"),
        ({"speculative_config": MODEL_DRAFT}, "speculative_config: found draft_model"),
        ({"kv_transfer_config": CONNECTOR}, "kv_connector: found ExampleConnector"),
        (LORA, "enable_lora: found True"),
    ],
    ids=["quantization", "drafts", "connector", "lora"],
)
def test_what_this_base_lacks_is_refused(engine: dict[str, Any], said: str, model: Path) -> None:
    if "kv_transfer_config" in engine:
        from vllm.config import KVTransferConfig

        engine = {"kv_transfer_config": KVTransferConfig(**engine["kv_transfer_config"])}
    if "speculative_config" in engine:
        engine = {"speculative_config": {**engine["speculative_config"], "model": str(model)}}
    with pytest.raises(ValueError, match="the standalone base of NPU mode") as raised:
        configuration(model, **engine)
    assert said in str(raised.value)
    assert "ascend_vllm_plugin.npu.limits" in str(raised.value)


def test_models_with_experts_are_refused(npu: Any) -> None:
    from ascend_vllm_plugin import NotInThisBaseError
    from ascend_vllm_plugin.npu.limits import require_in_standalone

    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=2)
    model = SimpleNamespace(quantization=None, is_moe=True, architectures=["MixtralForCausalLM"])
    nothing = dict.fromkeys(("speculative_config", "kv_transfer_config", "lora_config"))
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, use_v2_model_runner=False, **nothing
    )
    with pytest.raises(NotInThisBaseError) as raised:
        require_in_standalone(config)
    assert [one.parameter for one in raised.value.refusals] == [
        "architectures",
        "context parallel sizes",
    ]
    assert "architectures: found MixtralForCausalLM; allowed: models without" in str(raised.value)
    model.is_moe, parallel.prefill_context_parallel_size = False, 1
    require_in_standalone(config)


def test_the_v2_runner_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="V2 needs a Triton for NPUs"):
        configuration(model)


def test_float32_is_refused(platform: Any) -> None:
    import torch

    with pytest.raises(ValueError, match="--dtype: found float32; allowed on an NPU: bfloat16"):
        platform.check_if_supports_dtype(torch.float32)


def test_a_backend_of_vllm_is_refused(platform: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from ascend_attn_backends import NoBackendError

    with pytest.raises(NoBackendError, match="found FLASH_ATTN; allowed on an NPU: CUSTOM"):
        platform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, None)


def test_more_ranks_than_npus_are_refused(npu: Any) -> None:
    from ascend_vllm_plugin.npu.worker import StandaloneAscendWorker

    third = SimpleNamespace(local_rank=2)
    with pytest.raises(ValueError, match="rank 2 of this machine has no NPU: found 1"):
        StandaloneAscendWorker._visible_device(third)


def test_the_doctor_says_so(npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_vllm_plugin.doctor import diagnose

    found = {one.subject: one for one in diagnose(start=False)}
    assert found["mode"].found == (
        "emulated CANN, no NPU: standalone base (vllm-ascend is not installed)"
    )
    assert found["hardware"].found == f"emulated CANN, {npu.profile.soc_name}"


def test_explain_asks_the_platform_of_the_npu(model: Path, npu: Any) -> None:
    """In a process of its own: it builds a model, and leaves vLLM's ranks behind."""
    if npu.profile.family.value != "A3":
        pytest.skip("the command does not depend on the product: tested on A3")
    command = ("explain", str(model), "--dtype", "float16", "--max-model-len", "256")
    done = subprocess.run(
        [sys.executable, "-m", "ascend_vllm_plugin", *command],
        env={name: value for name, value in os.environ.items() if name != "ASCEND_HWPROFILE"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heading = f"(standalone on emulated CANN {npu.profile.soc_name}, vLLM {installed_vllm()})"
    assert f"Ascend attention routing {heading}" in done.stdout
    assert (
        "2 layers -> standard (ascend_vllm_plugin.npu.backends.NpuStandardBackend)" in done.stdout
    )


def test_another_profile_than_the_npus_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", "310P")
    with pytest.raises(ValueError, match="ASCEND_HWPROFILE='310P': allowed is unset, or an"):
        configuration(model)

"""Each patch of NPU mode is needed still: without it the thing that it mends fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_vllm_plugin.compat import SINCE_0_32, require_supported_vllm


@pytest.fixture(autouse=True)
def _restored(npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the patches change, as it was before."""
    import vllm.v1.worker.block_table as block_table
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend
    from vllm.v1.sample import rejection_sampler

    from ascend_vllm_plugin.patches import npu_streams

    for name in npu_streams.NAMES:
        monkeypatch.setattr(torch.cuda, name, getattr(STOCK, name))
    kernel = block_table.ComputeSlotMappingKernel.kernel
    monkeypatch.setattr(block_table._COMPUTE_SLOT_MAPPING_KERNEL, "kernel", kernel)
    vars(block_table._COMPUTE_SLOT_MAPPING_KERNEL).pop("_kernel_arg_names", None)
    dispatcher = rejection_sampler._rejection_greedy_sample
    stock = rejection_sampler.rejection_greedy_sample_kernel
    monkeypatch.setattr(dispatcher, "kernel", stock)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", get_mla_prefill_backend)
    vars(dispatcher).pop("_kernel_arg_names", None)


def _stock() -> Any:
    """`torch.cuda` as torch defines it."""
    from types import SimpleNamespace

    import torch.cuda.streams as streams

    functions = ("stream", "current_stream", "default_stream", "set_stream")
    own = {name: vars(torch.cuda)[name] for name in functions}
    return SimpleNamespace(Stream=streams.Stream, Event=streams.Event, **own)


STOCK = _stock()


def test_there_is_a_test_for_each() -> None:
    from ascend_vllm_plugin.patches import NPU_PATCHES

    tested = {"npu_streams", "npu_slot_mapping", "npu_rejection", "npu_mla_prefill"}
    assert {patch.name for patch in NPU_PATCHES} == tested


def copy_out() -> list[list[int]]:
    """What vLLM's V1 runner does with the tokens of a step."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    output = AsyncGPUModelRunnerOutput(
        model_runner_output=ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}),
        sampled_token_ids=torch.tensor([[7]], dtype=torch.int32, device="npu"),
        logprobs_tensors=None,
        invalid_req_indices=[],
        async_output_copy_stream=torch.cuda.Stream(),
        vocab_size=512,
    )
    return [list(tokens) for tokens in output.get_output().sampled_token_ids]


def test_streams_are_taken_from_cuda() -> None:
    from ascend_vllm_plugin.patches import npu_streams

    with pytest.raises((RuntimeError, AssertionError)):
        copy_out()
    assert npu_streams.apply()
    assert copy_out() == [[7]]


def table() -> Any:
    from vllm.v1.worker.block_table import BlockTable

    splits = require_supported_vllm() not in SINCE_0_32
    made = BlockTable(
        block_size=16,
        max_num_reqs=2,
        max_num_blocks_per_req=4,
        max_num_batched_tokens=32,
        pin_memory=False,
        device=torch.device("npu"),
        cp_kv_cache_interleave_size=1,
        **({"kernel_block_size": 16} if splits else {}),
    )
    made.add_row([5, 2], 0)
    made.add_row([3], 1)
    made.commit_block_table(2)
    return made


def slots() -> list[int]:
    """Of a request's tokens 14 to 17, and of another's token 9."""
    made = table()
    starts = torch.tensor([0, 4, 5], dtype=torch.int32, device="npu")
    positions = torch.tensor([14, 15, 16, 17, 9], device="npu")
    made.compute_slot_mapping(2, starts, positions)
    found: list[int] = made.slot_mapping.gpu.cpu().tolist()
    return found


def test_slots_are_computed_by_triton() -> None:
    from ascend_vllm_plugin.patches import npu_slot_mapping

    with pytest.raises(Exception, match=r"."):
        slots()
    assert npu_slot_mapping.apply()
    tokens = [5 * 16 + 14, 5 * 16 + 15, 2 * 16, 2 * 16 + 1, 3 * 16 + 9]
    assert slots() == tokens + [-1] * 27


def verified() -> list[list[int]]:
    """Drafts 5, 6 of one request and 7 of another; the target says 5, 9 and 7."""
    from vllm.v1.sample import rejection_sampler

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="npu")

    output = torch.full((2, 3), -1, dtype=torch.int32, device="npu")
    rejection_sampler._rejection_greedy_sample(
        output,
        numbers(2, 3),
        numbers(5, 6, 7),
        torch.tensor([5, 9, 7], device="npu"),
        torch.tensor([[1], [2]], device="npu"),
        None,
        2,
        None,
        None,
    )
    found: list[list[int]] = output.cpu().tolist()
    return found


def test_drafts_are_verified_by_triton() -> None:
    from ascend_vllm_plugin.patches import npu_rejection

    with pytest.raises(Exception, match=r"."):
        verified()
    assert npu_rejection.apply()
    assert verified() == [[5, 9, -1], [7, 2, -1]]


def test_mla_layers_want_a_backend_for_prompts() -> None:
    from vllm.model_executor.layers.attention import mla_attention

    from ascend_vllm_plugin.patches import npu_mla_prefill

    with pytest.raises(ImportError):
        mla_attention.get_mla_prefill_backend(None)
    assert npu_mla_prefill.apply()
    assert mla_attention.get_mla_prefill_backend(None).get_name() == "CPU_SDPA_MLA"

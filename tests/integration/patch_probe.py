"""Call vLLM's kernel dispatchers: `patch_probe.py JOB_FILE RESULT_FILE`.

The job is JSON: `patch` says whether our patches are applied after vLLM has set up its CPU
model runner. The result has, for each dispatcher, what it computed or the error it raised, and
how vLLM came by its kernels for CPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def int32(*values: int) -> torch.Tensor:
    """A vector of int32."""
    return torch.tensor(values, dtype=torch.int32)


def greedy() -> Any:
    """Two requests with drafts [5, 6] and [7]; the target says [5, 9] and [7]."""
    from vllm.v1.sample import rejection_sampler

    output = torch.full((2, 3), -1, dtype=torch.int32)
    rejection_sampler._rejection_greedy_sample(
        output,
        int32(2, 3),
        int32(5, 6, 7),
        torch.tensor([5, 9, 7]),
        torch.tensor([[1], [2]]),
        None,
        2,
        None,
        None,
    )
    return output.tolist()


def random() -> Any:
    """The same drafts; the target is sure of 5, against 6 (recovered: 9) and sure of 7."""
    from vllm.v1.sample import rejection_sampler

    target = torch.zeros(3, 10)
    target[0, 5] = target[1, 9] = target[2, 7] = 1.0
    output = torch.full((2, 3), -1, dtype=torch.int32)
    rejection_sampler._rejection_random_sample(
        output,
        int32(2, 3),
        int32(5, 6, 7),
        None,
        target,
        torch.tensor([[1], [2]]),
        int32(0, 9, 0),
        torch.full((3,), 0.5, dtype=torch.float64),
        torch.tensor([False, False]),
        2,
        None,
    )
    return output.tolist()


def recovered() -> Any:
    """Without draft probabilities: the best other token by probability times noise."""
    from vllm.v1.sample import rejection_sampler

    target = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])
    noise = torch.tensor([[1.0, 1.0, 1.0], [9.0, 1.0, 2.0]])
    output = torch.zeros(3, dtype=torch.int32)
    rejection_sampler._sample_recovered_tokens(
        output, int32(2, 3), int32(0, 2, 1), None, target, noise, max_spec_len=2
    )
    return output.tolist()


def expand() -> Any:
    """Values of requests with 2, 0 and 3 tokens, as float32 and as int32."""
    from vllm.v1.sample import rejection_sampler

    counts = int32(2, 2, 5)
    floats, integers = torch.empty(5), torch.empty(5, dtype=torch.int32)
    rejection_sampler._expand(floats, torch.tensor([0.5, 0.25, 0.0]), counts, 0, 1)
    rejection_sampler._expand(integers, int32(4, 5, 6), counts, 6, -1)
    return [floats.tolist(), integers.tolist()]


def eagle_step() -> Any:
    """A request inside a block, one at the end of its block, one at the end of the model."""
    from vllm.v1.spec_decode.utils import eagle_step_update_slot_mapping_and_metadata

    seq_lens, positions = int32(3, 4, 8), torch.full((3,), -9)
    slots = torch.full((5,), -9)
    eagle_step_update_slot_mapping_and_metadata(
        torch.tensor([2, 3, 7]),
        torch.tensor([[10, 11], [20, 21], [30, 31]], dtype=torch.int32),
        seq_lens,
        4,
        8,
        positions,
        slots,
        input_batch_size=5,
    )
    return [positions.tolist(), slots.tolist(), seq_lens.tolist()]


def dflash() -> Any:
    """One request with three context tokens, one of them rejected, and two draft positions."""
    from vllm.v1.spec_decode import utils

    out = {
        "out_input_ids_ptr": torch.full((3,), -9, dtype=torch.int32),
        "out_context_positions_ptr": torch.full((3,), -9),
        "out_query_positions_ptr": torch.full((3,), -9),
        "out_context_slot_mapping_ptr": torch.full((3,), -9),
        "out_query_slot_mapping_ptr": torch.full((3,), -9),
        "out_token_indices_ptr": torch.full((2,), -9, dtype=torch.int32),
    }
    utils._copy_and_expand_dflash_inputs(
        next_token_ids_ptr=int32(77),
        target_positions_ptr=torch.tensor([4, 5, 6]),
        block_table_ptr=torch.tensor([[10, 11, 12]], dtype=torch.int32),
        query_start_loc_ptr=int32(0, 3),
        num_rejected_tokens_ptr=int32(1),
        block_table_stride=3,
        parallel_drafting_token_id=99,
        block_size=4,
        num_query_per_req=3,
        num_speculative_tokens=2,
        total_input_tokens=3,
        max_tokens_per_req=6,
        triton_block_size=8,
        has_num_rejected=True,
        **out,
    )
    return {name: value.tolist() for name, value in out.items()}


PROBES: dict[str, Callable[[], Any]] = {
    "_rejection_greedy_sample": greedy,
    "_rejection_random_sample": random,
    "_sample_recovered_tokens": recovered,
    "_expand": expand,
    "_eagle_step_slot_mapping_metadata": eagle_step,
    "_copy_and_expand_dflash_inputs": dflash,
}


def probe(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call gives, or its error."""
    try:
        return {"value": call()}
    except Exception as error:  # noqa: BLE001 - whatever it raises is the result
        return {"error": f"{type(error).__name__}: {error}"}


def place_cpu_kernels(*, patch: bool) -> dict[str, Any]:
    """Have vLLM place its CPU kernels, beside llvmlite, too; how that went.

    The runner does it in vLLM 0.30. Since 0.31 the platform does, which searches all modules for
    them; a platform that stops at llvmlite's has placed them before.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from ascend_vllm_plugin.simulated_platform import SimulatedAscendPlatform

    platform: Any = SimulatedAscendPlatform if patch else CpuPlatform
    if not hasattr(CpuPlatform, "register_triton_kernel_overrides"):
        CPUModelRunner._postprocess_triton(None)  # type: ignore[arg-type]  # it uses no runner
        return {"value": "vLLM places them without a search"}
    if not patch:
        platform.register_triton_kernel_overrides()
    import_module("llvmlite.binding")
    return probe(platform.register_triton_kernel_overrides)


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    placed = place_cpu_kernels(patch=job["patch"])
    applied: list[str] = []
    if job["patch"]:
        from ascend_vllm_plugin.patches import apply_patches

        applied = list(apply_patches())
        assert tuple(applied) == apply_patches(), "applying twice is as applying once"
    probes = {name: probe(call) for name, call in PROBES.items()}
    result = {"placed": placed, "applied": applied, "probes": probes}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

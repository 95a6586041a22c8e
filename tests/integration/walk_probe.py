"""DFlash2 on both runners of vLLM: `walk_probe.py JOB_FILE RESULT_FILE`.

The job is JSON and empty; the process has Triton's interpreter (`VLLM_USE_V2_MODEL_RUNNER=1`). The
result has what the V1 runner refuses without and with the patch, what the V2 speculator's kernel
does without and with boolean masks, and the tokens of the kernel and of our walk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from patch_probe import probe

BATCH, STEPS, TOP_K = 5, 4, 8


def refused_by_v1(architecture: str = "DFlash2DraftModel") -> list[str]:
    """Features that vLLM's V1 runner has not, of an engine with a draft that chooses."""
    from vllm.config import VllmConfig

    draft = SimpleNamespace(architectures=[architecture])
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            enable_batch_sharded_sampling=False,
        ),
        speculative_config=SimpleNamespace(
            method="dflash", enable_adaptive_verification=False, draft_model_config=draft
        ),
        model_config=None,
        _dflash_needs_multi_kv_group=lambda: False,
        _is_dflash2_draft=lambda: True,
        _is_dflash_candidate_draft=lambda: True,
    )
    return VllmConfig._get_v1_model_runner_unsupported_features(config)


def candidates_and_scores() -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones; in step 0 every predecessor is the anchor."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(BATCH, STEPS, TOP_K, TOP_K, generator=generator)
    scores[:, 0] = scores[:, 0, :1]
    return torch.randint(0, 500, (BATCH, STEPS, TOP_K), generator=generator), scores


def kernel_tokens() -> list[list[int]]:
    """What the V2 speculator's kernel chooses for greedy requests."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import _selector_walk_kernel

    candidates, scores = candidates_and_scores()
    tokens = torch.full((BATCH, STEPS), -1)
    _selector_walk_kernel[(BATCH,)](
        scores,
        candidates,
        torch.arange(BATCH * STEPS),
        torch.arange(BATCH, dtype=torch.int32).repeat_interleave(STEPS),
        torch.zeros(BATCH),
        torch.zeros(BATCH, dtype=torch.int64),
        tokens,
        torch.zeros(BATCH, STEPS, TOP_K),
        num_steps=STEPS,
        top_k=TOP_K,
        BLOCK_K=TOP_K,
        SAMPLE_PROBABILISTIC=False,
        USE_FP64=False,
        num_warps=1,
    )
    return tokens.tolist()


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from ascend_vllm_plugin.patches import dflash2_on_v1, interpreter_masks

    result: dict[str, Any] = {"stock": probe(refused_by_v1), "stock masks": probe(kernel_tokens)}
    for _ in range(2):  # twice is the same as once
        dflash2_on_v1.allow_configuration()
        assert interpreter_masks.apply()
    result["patched"], result["kernel"] = probe(refused_by_v1), probe(kernel_tokens)
    result["another"] = probe(lambda: refused_by_v1("LiLiCorrDraftModel"))
    candidates, scores = candidates_and_scores()
    result["walk"] = dflash2_on_v1.walk(candidates, scores, dflash2_on_v1.best)[0].tolist()
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

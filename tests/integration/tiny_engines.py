"""The tiny models that real vLLM serves, and the engines that serve them.

Loading vLLM takes much longer than a tiny engine does, so one process runs all engines on one rank,
and two processes those on two ranks; see the fixtures `single` and `ranks` in `conftest.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from several_engines import engine
from tiny_models import LENGTHS, PERIOD, VOCABULARY

MODELS: dict[str, list[Any]] = {
    "deepseek_v3": ["make_deepseek_v3"],
    "glm": ["make_glm"],
    "wavering_glm": ["make_drafting_glm", 0.85],
    "agreeing_glm": ["make_drafting_glm", 0.5],
    "wavering_deepseek_v3": ["make_drafting_deepseek_v3", 1.1],
    "agreeing_deepseek_v3": ["make_drafting_deepseek_v3", 0.5],
    "repeating_deepseek_v3": ["make_repeating_deepseek_v3"],
    "qwen3": ["make_qwen3"],
    "llama": ["make_llama"],
    "deepseek_v4": ["make_deepseek_v4"],
}
"""Name -> function that makes it, and its arguments."""

JUDGED = [
    "mla",
    "sfa",
    "mla, mtp 3",
    "sfa, mtp 3",
    "mla, agreeing",
    "sfa, agreeing",
    "repeating, n-gram",
    "fa3",
    "llama",
]
"""Engines whose first run transformers judges in the same process."""

TOKEN_BUDGET = 32
CHUNKED: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": TOKEN_BUDGET,
}
BLOCK_SIZE = 32
CACHED: dict[str, Any] = {**CHUNKED, "enable_prefix_caching": True, "block_size": BLOCK_SIZE}
NGRAM = {
    "speculative_config": {
        "method": "custom_class",
        "model": "ascend_vllm_plugin.NgramProposer",
        "num_speculative_tokens": 4,
    }
}
VLLM_NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
}
TRAINING = {"additional_config": {"ascend": {"training_consistency": True}}}
DCP = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
PCP = {"prefill_context_parallel_size": 2}

HALF_SEEDS = {20: 75, 47: 119, 130: 115}
"""Length of a prompt -> seed. Of 192 seeds these leave the best logit of DeepSeek-V4, which vLLM
computes in half precision only, far from the second, and do not repeat a few tokens."""
COMPRESSED_FAULTS = ("compressed_keys_forgotten", "states_forgotten")


def mtp(count: int) -> dict[str, Any]:
    """Drafts of the model's own MTP layer."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}}


def half_prompts() -> list[list[int]]:
    """Prompts for half precision."""
    found = []
    for length, seed in HALF_SEEDS.items():
        generator = random.Random(seed)
        found.append([generator.randrange(3, VOCABULARY) for _ in range(length)])
    return found


def repeating_prompts() -> list[list[int]]:
    """Texts of the model that repeats itself, each from another group of tokens."""
    return [
        [PERIOD * number + place % PERIOD for place in range(length)]
        for number, length in enumerate(LENGTHS, start=10)
    ]


HAS_COMPRESSED_KERNELS = torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported()
"""Whether vLLM takes its build that has the kernels which its DeepSeek-V4 calls, by vLLM's rule."""


def _compressed(**arguments: Any) -> dict[str, Any]:
    """Arguments of an engine for DeepSeek-V4, whose caches have many small blocks."""
    fixed = {"prompts": half_prompts(), "dtype": "float16", "num_gpu_blocks_override": 512}
    return {**fixed, **CACHED, "block_size": 16, **arguments}


def single_engines(models: Path) -> list[dict[str, Any]]:
    """Engines on one rank."""
    v3, glm, wavering_glm, agreeing_glm, wavering_v3, agreeing_v3, repeating, qwen3, llama, v4 = (
        str(models / name) for name in MODELS
    )
    again: dict[str, str | None] = {"sound": None, "again": None}
    return [
        engine("mla", v3, {**again, "broken": "latents_without_causal_mask"}, **CACHED),
        engine("sfa", glm, {**again, "broken": "half_of_the_choice"}, **CACHED),
        engine("mla, n-gram", v3, **NGRAM),
        engine("mla, n-gram of vLLM", v3, **VLLM_NGRAM),
        engine("repeating, n-gram", repeating, prompts=repeating_prompts(), **NGRAM),
        engine("repeating, n-gram of vLLM", repeating, prompts=repeating_prompts(), **VLLM_NGRAM),
        engine("sfa, mtp 1", glm, **mtp(1)),
        engine("mla, mtp 3", wavering_v3, **mtp(3)),
        engine(
            "sfa, mtp 3", wavering_glm, {"sound": None, "broken": "accept_every_draft"}, **mtp(3)
        ),
        engine(
            "sfa, agreeing", agreeing_glm, {"sound": None, "broken": "drafts_off_by_one"}, **mtp(3)
        ),
        engine("mla, agreeing", agreeing_v3, **mtp(3)),
        engine(
            "fa3",
            qwen3,
            {"sound": None, "broken": "training_attention_without_causal_mask"},
            **TRAINING,
            **CHUNKED,
        ),
        engine("llama", llama),
        *(compressed_engines(v4) if HAS_COMPRESSED_KERNELS else ()),
    ]


def compressed_engines(v4: str) -> list[dict[str, Any]]:
    """Engines for DeepSeek-V4."""
    faults: dict[str, str | None] = {fault: fault for fault in COMPRESSED_FAULTS}
    runs = {"sound": None, "again": None, **faults}
    return [
        engine("dsa", v4, runs, **_compressed()),
        engine("dsa, n-gram", v4, **_compressed(**NGRAM)),
    ]


def rank_engines(models: Path) -> list[dict[str, Any]]:
    """Engines on two ranks."""
    v3, glm, wavering_glm, agreeing_glm, wavering_v3, agreeing_v3, _, _, llama, _ = (
        str(models / name) for name in MODELS
    )
    own: dict[str, str | None] = {"sound": None, "broken": "only_the_own_part"}
    first: dict[str, str | None] = {"sound": None, "broken": "only_rows_of_the_first_rank"}
    again: dict[str, str | None] = {"sound": None, "again": None}
    engines = [
        engine("mla, pcp", v3, {**again, **first}, **PCP, **CACHED),
        engine("sfa, pcp", glm, first, **PCP, **CHUNKED),
        engine("sfa, dcp", glm, {**again, **own}, **DCP, **CACHED),
        engine("mla, mtp 3, dcp", wavering_v3, **DCP, **mtp(3)),
        engine("mla, mtp 3, pcp", wavering_v3, **PCP, **mtp(3)),
        engine("sfa, mtp 3, dcp", wavering_glm, **DCP, **mtp(3)),
        engine("sfa, mtp 3, pcp", wavering_glm, **PCP, **mtp(3)),
        engine("mla, agreeing, dcp", agreeing_v3, **DCP, **mtp(3)),
        engine("mla, agreeing, pcp", agreeing_v3, **PCP, **mtp(3)),
        engine("sfa, agreeing, dcp", agreeing_glm, **DCP, **mtp(3)),
        engine("sfa, agreeing, pcp", agreeing_glm, **PCP, **mtp(3)),
        engine("llama, dcp", llama, own, **DCP, **CHUNKED),
        engine("mla, dcp", v3, own, **DCP, **CHUNKED),
    ]
    engines[-1]["probe_merges"] = True  # last: a kernel that fails leaves the interpreter broken
    return engines

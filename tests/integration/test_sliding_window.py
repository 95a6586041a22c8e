"""Qwen3 whose layers all have a sliding window, whole and in chunks, against HF transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Outcome, hf_argmax, run_engine
from tiny_models import LENGTHS, SLIDING_WINDOW, make_sliding_qwen3, random_prompts

from ascend_vllm_plugin import read_routing

pytestmark = pytest.mark.engine

NUM_LAYERS = 3
NUM_TOKENS = 48
TOKEN_BUDGET = 32
MIN_MARGIN = 5e-4
"""As in test_smollm2.py."""


def runs(*faults: str) -> list[dict[str, Any]]:
    """The sound run, and one for each fault."""
    return [
        {
            "name": fault or "sound",
            "prompts": random_prompts(),
            "max_tokens": NUM_TOKENS,
            "fault": fault or None,
        }
        for fault in ("", *faults)
    ]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sliding_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def whole(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("whole")
    return run_engine(qwen3, runs("window_one_too_long", "no_causal_mask"), folder)


@pytest.fixture(scope="module")
def chunked(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("chunked")
    return run_engine(
        qwen3,
        runs(),
        folder,
        enable_chunked_prefill=True,
        max_num_batched_tokens=TOKEN_BUDGET,
    )


@pytest.fixture(scope="module")
def hf(
    qwen3: Path, whole: Outcome, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    pairs = zip(random_prompts(), whole.tokens("sound"), strict=True)
    cases = [{"prompt": prompt, "output": output} for prompt, output in pairs]
    return hf_argmax(qwen3, cases, tmp_path_factory.mktemp("hf"))


def test_every_layer_is_windowed_and_ours(whole: Outcome) -> None:
    (row,) = read_routing(whole.folder / "routing.json").rows
    assert row.kind == f"target, sliding window of {SLIDING_WINDOW} keys"
    assert (row.backend, len(row.layers)) == ("standard", NUM_LAYERS)
    assert row.request["sliding_window"] == SLIDING_WINDOW


def test_whole_prompts_equal_hf(whole: Outcome, hf: list[dict[str, Any]]) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in whole.tokens("sound"))
    assert [row["tokens"] for row in hf] == whole.tokens("sound")
    assert min(min(row["margins"]) for row in hf) > MIN_MARGIN


def test_chunks_equal_hf(chunked: Outcome, whole: Outcome, hf: list[dict[str, Any]]) -> None:
    assert [row["tokens"] for row in hf] == chunked.tokens("sound")
    least = sum(LENGTHS) // TOKEN_BUDGET + NUM_TOKENS
    assert chunked.steps("sound", NUM_LAYERS) >= least > whole.steps("sound", NUM_LAYERS)


@pytest.mark.parametrize("fault", ["window_one_too_long", "no_causal_mask"])
def test_a_wrong_mask_gives_other_tokens(fault: str, whole: Outcome) -> None:
    assert whole.tokens(fault) != whole.tokens("sound")

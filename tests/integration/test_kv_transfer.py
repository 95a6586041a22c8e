"""Prefill and decode on two engines: keys and values go through vLLM's example connector.

The prefill engine computes the prompts and their first token; the decode engine loads what was
stored and goes on. Both run our backend in simulate mode, in transfer windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import environment, hf_argmax, run_script
from tiny_models import LENGTHS, make_qwen3, random_prompts

pytestmark = pytest.mark.engine

BLOCK_SIZE = 16
NUM_LAYERS = 3
NUM_TOKENS = 24
STORED = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
"""Tokens of each prompt that the example connector stores: blocks before the last token."""
MIN_MARGIN = 5e-4
"""As in test_smollm2.py."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("full_qwen3"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def run_role(
    model: Path, store: Path, folder: Path, role: str, runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Run one engine; returns what it says about each run."""
    engine = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": False,
    }
    job = {"engine": engine, "store": str(store), "role": role, "runs": runs}
    result, _ = run_script("kv_transfer_runner.py", job, folder, environment(simulate=True))
    found: dict[str, Any] = result["runs"]
    return found


@pytest.fixture(scope="module")
def prefill(qwen3: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The prefill engine; it goes on alone, for comparison, and fails in its last run."""
    others = [prompt[::-1] for prompt in random_prompts()]
    runs = [
        {"name": "alone", "prompts": random_prompts(), "max_tokens": NUM_TOKENS, "store": "kept"},
        {
            "name": "failing",
            "prompts": others,
            "max_tokens": 1,
            "store": "kept",
            "fault": "attention_fails",
        },
    ]
    folder = tmp_path_factory.mktemp("prefill")
    return run_role(qwen3, store, folder, "kv_producer", runs)


@pytest.fixture(scope="module")
def decode(
    qwen3: Path, store: Path, prefill: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The decode engine: with what was stored, with zeros in its place, with nothing."""
    first = prefill["alone"]["tokens"]
    prompts = [[*prompt, tokens[0]] for prompt, tokens in zip(random_prompts(), first, strict=True)]
    runs = [
        {"name": change, "prompts": prompts, "max_tokens": NUM_TOKENS - 1, "store": change}
        for change in ("kept", "zeroed", "removed")
    ]
    folder = tmp_path_factory.mktemp("decode")
    return run_role(qwen3, store, folder, "kv_consumer", runs)


def rest(prefill: dict[str, Any]) -> list[list[int]]:
    """What the prefill engine said after the first token."""
    return [tokens[1:] for tokens in prefill["alone"]["tokens"]]


def test_the_engine_alone_says_what_hf_says(
    qwen3: Path, prefill: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pairs = zip(random_prompts(), prefill["alone"]["tokens"], strict=True)
    cases = [{"prompt": prompt, "output": output} for prompt, output in pairs]
    said = hf_argmax(qwen3, cases, tmp_path_factory.mktemp("hf"))
    assert [row["tokens"] for row in said] == prefill["alone"]["tokens"]
    assert min(min(row["margins"]) for row in said) > MIN_MARGIN


def test_the_prefill_engine_stores_every_layer_of_every_prompt(prefill: dict[str, Any]) -> None:
    assert prefill["alone"]["gained"] == [NUM_LAYERS] * len(LENGTHS)
    assert prefill["alone"]["cached"] == [0] * len(LENGTHS)


def test_the_decode_engine_goes_on_as_one_engine_would(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    assert decode["kept"]["cached"] == STORED
    assert decode["kept"]["tokens"] == rest(prefill)


def test_zeros_in_the_store_give_other_tokens(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    assert decode["zeroed"]["cached"] == STORED
    assert decode["zeroed"]["tokens"] != rest(prefill)


def test_what_is_not_in_the_store_is_computed(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    assert decode["removed"]["cached"] == [0] * len(LENGTHS)
    assert decode["removed"]["tokens"] == rest(prefill)


def test_transfers_happen_outside_the_windows_of_attention(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    for run, steps in ((prefill["alone"], NUM_TOKENS), (decode["kept"], NUM_TOKENS - 1)):
        windows = run["windows"]
        assert windows["started"] == windows["ended"] == NUM_LAYERS * steps
        assert windows["start_load_kv"] >= steps
        assert windows["save_kv_layer"] == NUM_LAYERS * steps
        assert windows["inside a window"] == 0


def test_a_step_that_fails_ends_its_window_and_stores_nothing(prefill: dict[str, Any]) -> None:
    failing = prefill["failing"]
    assert failing["error"] == "no such kernel"
    windows = failing["windows"]
    assert windows["started"] == 2
    assert windows["ended"] == windows["failed: no such kernel"] == 1
    assert windows.get("save_kv_layer", 0) == 0
    assert failing["gained"] == []

"""Dense models beside the standard backend in real vLLM: the same greedy tokens as transformers.

Tiny models with random weights, in float32: Qwen3 on the backend that computes what training does
(FA3, its reference on a CPU), and Llama with one key/value head on two ranks that share its keys
(TP2 + DCP2, vLLM's V2 runner).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import environment, run_script
from several_engines import MIN_MARGIN, NUM_TOKENS, Outcome, engine, run_on_ranks

from ascend_vllm_plugin import read_routing

pytestmark = pytest.mark.engine

LAYERS = {"fa3": 3, "dcp": 2}
TRAINING = {"additional_config": {"ascend": {"training_consistency": True}}}
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
DCP = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models; the process with the engines makes them."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Engines on one rank."""
    folder = tmp_path_factory.mktemp("single")
    qwen3, llama = str(models / "qwen3"), str(models / "llama")
    faults = {"sound": None, "broken": "training_attention_without_causal_mask"}
    engines = [
        engine("fa3", qwen3, faults, **TRAINING, **CHUNKED),
        engine("llama", llama),
    ]
    makers = {qwen3: ["make_qwen3"], llama: ["make_llama"]}
    job = {"models": makers, "engines": engines, "reference": ["fa3", "llama"]}
    result, _ = run_script("latent_runner.py", job, folder, environment(True))
    return Outcome(result, folder)


@pytest.fixture(scope="module")
def ranks(single: Outcome, models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The engine on two ranks."""
    llama, faults = str(models / "llama"), {"sound": None, "broken": "only_the_own_part"}
    job = engine("dcp", llama, faults, **DCP, **CHUNKED)
    return run_on_ranks([job], tmp_path_factory.mktemp("ranks"))


def test_training_consistency_takes_fa3(single: Outcome) -> None:
    (row,) = read_routing(single.folder / "fa3.routing.json").rows
    assert (row.backend, len(row.layers), row.chosen_by) == ("fa3", LAYERS["fa3"], "selection")
    assert (row.request["training_consistency"], row.request["graph_mode"]) == (True, "none")
    assert single.run("fa3")["calls"]["AscendFAImpl.forward"] >= LAYERS["fa3"] * NUM_TOKENS


@pytest.mark.parametrize("name", ["fa3", "llama"])
def test_tokens_equal_transformers(name: str, single: Outcome) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in single.tokens(name))
    assert single.tokens(name) == single.reference(name)
    assert min(min(case["margins"]) for case in single.result["reference"][name]) > MIN_MARGIN


def test_a_missing_mask_gives_other_tokens(single: Outcome) -> None:
    assert single.tokens("fa3", "broken") != single.first_of_reference("fa3")


def test_ranks_that_share_keys_give_the_tokens_of_transformers(
    single: Outcome, ranks: list[Outcome]
) -> None:
    for outcome in ranks:
        assert outcome.tokens("dcp") == single.reference("llama")


def test_layers_on_ranks_are_ours(ranks: list[Outcome]) -> None:
    (row,) = read_routing(ranks[0].folder / "dcp.routing.json").rows
    assert (row.backend, len(row.layers)) == ("standard_dcp", LAYERS["dcp"])
    heads = (row.request["num_heads"], row.request["num_kv_heads"])
    assert (heads, row.request["context_parallel_size"]) == ((2, 1), 2)
    for outcome in ranks:
        calls = outcome.run("dcp")["calls"]["AscendAttentionDCPImpl.forward"]
        assert calls >= LAYERS["dcp"] * NUM_TOKENS


def test_ranks_that_forget_each_other_give_other_tokens(
    single: Outcome, ranks: list[Outcome]
) -> None:
    assert ranks[0].tokens("dcp", "broken") != single.first_of_reference("llama")

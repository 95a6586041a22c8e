"""Dense models beside the standard backend in real vLLM: the same greedy tokens as transformers.

Tiny models with random weights, in float32, served by the engines of `tiny_engines.py`: Qwen3 on
the backend that computes what training does (FA3, its reference on a CPU), and Llama with one
key/value head on two ranks that share its keys (TP2 + DCP2, vLLM's V2 runner).
"""

from __future__ import annotations

import pytest
from several_engines import MIN_MARGIN, NUM_TOKENS, Outcome

from ascend_vllm_plugin import read_routing

pytestmark = pytest.mark.engine

LAYERS = {"fa3": 3, "dcp": 2}


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
        assert outcome.tokens("llama, dcp") == single.reference("llama")


def test_layers_on_ranks_are_ours(ranks: list[Outcome]) -> None:
    (row,) = read_routing(ranks[0].folder / "llama, dcp.routing.json").rows
    assert (row.backend, len(row.layers)) == ("standard_dcp", LAYERS["dcp"])
    heads = (row.request["num_heads"], row.request["num_kv_heads"])
    assert (heads, row.request["context_parallel_size"]) == ((2, 1), 2)
    for outcome in ranks:
        calls = outcome.run("llama, dcp")["calls"]["AscendAttentionDCPImpl.forward"]
        assert calls >= LAYERS["dcp"] * NUM_TOKENS


def test_ranks_that_forget_each_other_give_other_tokens(
    single: Outcome, ranks: list[Outcome]
) -> None:
    assert ranks[0].tokens("llama, dcp", "broken") != single.first_of_reference("llama")

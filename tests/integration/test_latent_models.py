"""Models with latent attention in real vLLM: the same greedy tokens as transformers give.

Tiny models with random weights, in float32: DeepSeek-V3 (MLA) and GLM-5 (sparse MLA with an
indexer), both with an MTP layer where they draft. The tests look at what the engines of
`tiny_engines.py` left, on one rank and on two under context parallelism.
"""

from __future__ import annotations

import pytest
from several_engines import MIN_MARGIN, NUM_TOKENS, Outcome
from tiny_engines import BLOCK_SIZE, TOKEN_BUDGET
from tiny_models import random_prompts

from ascend_vllm_plugin import read_routing
from ascend_vllm_plugin.compat import SINCE_0_32, require_supported_vllm

pytestmark = pytest.mark.engine

LAYERS = {"mla": 2, "sfa": 3}
DRAFTING = ("mla, mtp 3", "sfa, mtp 3")
AGREEING = ("mla, agreeing", "sfa, agreeing")
COMPUTED = {
    ("mla", "dcp"): "AscendMLAImpl.forward_mqa_partial",
    ("sfa", "dcp"): "AscendSFAImpl.forward_partial",
    ("mla", "pcp"): "AscendMLAImpl.forward_mqa",
    ("sfa", "pcp"): "AscendSFAImpl.forward",
}
"""What ranks count for each layer and step."""


@pytest.mark.parametrize("name", ["mla", "sfa"])
def test_every_layer_of_every_step_is_ours(name: str, single: Outcome) -> None:
    row, *indexers = read_routing(single.folder / f"{name}.routing.json").rows
    assert (row.backend, len(row.layers), row.chosen_by) == (name, LAYERS[name], "selection")
    assert len(indexers) == (name == "sfa")
    calls = single.run(name, "again")["calls"]
    computed = "AscendMLAImpl.forward_mqa" if name == "mla" else "AscendSFAImpl.forward"
    assert calls[computed] >= LAYERS[name] * NUM_TOKENS


def test_layers_that_share_a_choice_run_one_indexer(single: Outcome) -> None:
    calls = single.run("sfa")["calls"]
    assert calls["AscendSFAIndexerDCPImpl.forward"] * 3 == calls["AscendSFAImpl.forward"] * 2


@pytest.mark.parametrize("name", ["mla", "sfa", *DRAFTING, *AGREEING, "repeating, n-gram"])
def test_tokens_equal_transformers(name: str, single: Outcome) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in single.tokens(name))
    assert single.tokens(name) == single.reference(name)
    margins = [min(case["margins"]) for case in single.result["reference"][name]]
    assert min(margins) > MIN_MARGIN


@pytest.mark.parametrize("name", ["mla", "sfa"])
def test_prompts_come_in_chunks(name: str, single: Outcome) -> None:
    """197 tokens of prompts in steps of 32; the platform's limits on MLA are gone."""
    calls = single.run(name)["calls"]
    computed = "AscendMLAImpl.forward_mqa" if name == "mla" else "AscendSFAImpl.forward"
    prompts = sum(map(len, random_prompts()))
    assert calls[computed] / LAYERS[name] >= prompts // TOKEN_BUDGET + NUM_TOKENS


@pytest.mark.parametrize("name", ["mla", "sfa"])
def test_cached_prefixes_give_the_same_tokens(name: str, single: Outcome) -> None:
    assert single.run(name)["cached"] == [0, 0, 0]
    whole_blocks = [(len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in random_prompts()]
    assert single.run(name, "again")["cached"] == whole_blocks
    assert single.tokens(name, "again") == single.reference(name)


@pytest.mark.parametrize("name", ["mla", "sfa"])
def test_a_fault_gives_other_tokens(name: str, single: Outcome) -> None:
    assert single.tokens(name, "broken") != single.first_of_reference(name)


@pytest.mark.parametrize(
    ("name", "plain"),
    [("mla, n-gram", "mla"), ("mla, n-gram of vLLM", "mla"), ("sfa, mtp 1", "sfa")],
)
def test_speculation_gives_the_same_tokens(name: str, plain: str, single: Outcome) -> None:
    assert single.tokens(name) == single.tokens(plain) == single.reference(plain)
    drafted, accepted = single.drafts(name)
    assert drafted > accepted > 0


@pytest.mark.parametrize("name", DRAFTING)
def test_three_drafts_are_taken_and_rejected_at_every_position(name: str, single: Outcome) -> None:
    drafted, accepted = single.drafts(name)
    assert drafted > accepted
    first, second, third = single.accepted_at(name)
    assert first > second > third > 0


@pytest.mark.parametrize("drafter", ["n-gram", "n-gram of vLLM"])
def test_every_n_gram_of_a_text_that_repeats_is_accepted(drafter: str, single: Outcome) -> None:
    assert single.tokens(f"repeating, {drafter}") == single.reference("repeating, n-gram")
    drafted, accepted = single.drafts(f"repeating, {drafter}")
    assert drafted == accepted > 0


def test_a_verification_that_accepts_everything_gives_other_tokens(single: Outcome) -> None:
    assert single.tokens("sfa, mtp 3", "broken") != single.first_of_reference("sfa, mtp 3")


@pytest.mark.parametrize("name", AGREEING)
def test_every_draft_of_an_agreeing_drafter_is_accepted(name: str, single: Outcome) -> None:
    drafted, accepted = single.drafts(name)
    assert drafted == accepted > 0


def test_drafts_that_are_off_by_one_are_all_rejected(single: Outcome) -> None:
    drafted, accepted = single.drafts("sfa, agreeing", "broken")
    assert drafted > 0
    assert accepted == 0
    assert single.tokens("sfa, agreeing", "broken") == single.first_of_reference("sfa, agreeing")


@pytest.mark.parametrize("how", ["dcp", "pcp"])
@pytest.mark.parametrize("plain", ["mla", "sfa"])
def test_ranks_that_share_a_context_give_the_same_tokens(
    plain: str, how: str, single: Outcome, ranks: list[Outcome]
) -> None:
    for outcome in ranks:
        assert outcome.tokens(f"{plain}, {how}") == single.reference(plain)


@pytest.mark.parametrize(("plain", "how"), COMPUTED)
def test_layers_on_ranks_are_ours(plain: str, how: str, ranks: list[Outcome]) -> None:
    (row, *_) = read_routing(ranks[0].folder / f"{plain}, {how}.routing.json").rows
    assert (row.backend, len(row.layers)) == (f"{plain}_{how}", LAYERS[plain])
    for outcome in ranks:
        assert outcome.run(f"{plain}, {how}")["calls"][COMPUTED[plain, how]] > 0


@pytest.mark.parametrize("how", ["dcp", "pcp"])
@pytest.mark.parametrize("plain", ["mla", "sfa"])
def test_prompts_come_in_chunks_on_ranks(plain: str, how: str, ranks: list[Outcome]) -> None:
    chunks = sum(map(len, random_prompts())) // TOKEN_BUDGET
    calls = [outcome.run(f"{plain}, {how}")["calls"] for outcome in ranks]
    steps = [counts[COMPUTED[plain, how]] / LAYERS[plain] for counts in calls]
    # Since 0.32 ranks that share prompts alone have requests of their own to decode.
    apart = how == "pcp" and require_supported_vllm() in SINCE_0_32
    assert min(steps) >= chunks
    assert (sum(steps) if apart else min(steps)) >= chunks + NUM_TOKENS


@pytest.mark.parametrize(("plain", "how", "block"), [("sfa", "dcp", 2), ("mla", "pcp", 1)])
def test_cached_prefixes_give_the_same_tokens_on_ranks(
    plain: str, how: str, block: int, single: Outcome, ranks: list[Outcome]
) -> None:
    """Ranks that share keys have a block of as many more tokens."""
    size = block * BLOCK_SIZE
    for outcome in ranks:
        run = outcome.run(f"{plain}, {how}", "again")
        assert outcome.run(f"{plain}, {how}")["cached"] == [0, 0, 0]
        assert run["cached"] == [(len(p) - 1) // size * size for p in random_prompts()]
        assert run["tokens"] == single.reference(plain)


@pytest.mark.parametrize("how", ["dcp", "pcp"])
@pytest.mark.parametrize("plain", ["mla", "sfa"])
def test_ranks_that_forget_each_other_give_other_tokens(
    plain: str, how: str, single: Outcome, ranks: list[Outcome]
) -> None:
    assert ranks[0].tokens(f"{plain}, {how}", "broken") != single.first_of_reference(plain)


@pytest.mark.parametrize("how", ["dcp", "pcp"])
@pytest.mark.parametrize("name", DRAFTING)
def test_ranks_reject_the_same_drafts_as_one_rank(
    name: str, how: str, single: Outcome, ranks: list[Outcome]
) -> None:
    """What a rejected draft wrote is seen by nobody, wherever its row is."""
    for outcome in ranks:
        assert outcome.tokens(f"{name}, {how}") == single.reference(name)
        drafted, accepted = outcome.drafts(f"{name}, {how}")
        assert 0 < accepted < drafted
        assert (drafted, accepted) == single.drafts(name)


@pytest.mark.parametrize("how", ["dcp", "pcp"])
@pytest.mark.parametrize("name", AGREEING)
def test_ranks_accept_every_draft_of_an_agreeing_drafter(
    name: str, how: str, single: Outcome, ranks: list[Outcome]
) -> None:
    for outcome in ranks:
        assert outcome.tokens(f"{name}, {how}") == single.reference(name)
        assert outcome.drafts(f"{name}, {how}") == single.drafts(name)
    drafted, accepted = ranks[0].drafts(f"{name}, {how}")
    assert drafted == accepted > 0


@pytest.mark.parametrize("name", ["cp_lse_ag_out_rs", "cp_lse_ag_out_ar"])
def test_the_patch_dcp_merge_is_still_needed(name: str, ranks: list[Outcome]) -> None:
    said = ranks[0].result["engines"]["mla, dcp"]["merges"]["functions"][name]
    assert "constexprs" in said.get("error", "none: drop it from the patch")


def test_vllm_still_merges_by_all_to_all_in_a_kernel(ranks: list[Outcome]) -> None:
    """It is right, and takes the interpreter a program for each token and head."""
    merges = ranks[0].result["engines"]["mla, dcp"]["merges"]
    assert merges["functions"]["dcp_a2a_lse_reduce"]["value"] == [[[1.0] * 16] * 2] * 2
    assert merges["a2a kernel"] == "InterpretedFunction", "drop it from the patch"

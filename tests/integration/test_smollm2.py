"""A real model through the standard backend: the same greedy tokens as two others give.

The others are vLLM's own CPU_ATTN backend, in a vLLM without simulate mode, and HF transformers.
Every engine runs once; the tests look at what it left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import prompts
import pytest
from control_drafters import DRAFT_SECONDS
from engines import Outcome, hf_argmax, run_engine

from ascend_vllm_plugin import read_routing

pytestmark = pytest.mark.engine

NUM_LAYERS = 30
NUM_TOKENS = 64
NUM_CONTROL_TOKENS = 24
TOKEN_BUDGET = 64
NUM_DRAFTS = 4
PROPOSERS = {
    "suffix": "ascend_vllm_plugin.SuffixProposer",
    "lookup": "ascend_vllm_plugin.PromptLookupProposer",
    "composite": "ascend_vllm_plugin.CompositeProposer",
    "wrong": "control_drafters.WrongProposer",
}
"""Runs of the speculative engine with drafters that draft ahead; the last one is the control."""
SLOW = "control_drafters.SlowProposer"
NUM_PATIENT_TOKENS = 3
UNDER_OPTIONS = {
    "slow": {"drafter": SLOW, "options": {"draft_deadline_ms": 3.0}},
    "slow, awaited": {"drafter": SLOW, "max_tokens": NUM_PATIENT_TOKENS},
    "adaptive": {"drafter": PROPOSERS["suffix"], "options": {"adaptive_k": True}},
    "adaptive, wrong": {"drafter": PROPOSERS["wrong"], "options": {"adaptive_k": True}},
}
"""Further runs of it, with options of their own."""
RUNS = ("short", "batch", "shared_prefix", "rewrite")
MIN_MARGIN = 5e-4
"""Least distance of HF's best logit from the second one, ten times what rounding in float32 was
seen to move log-probabilities by (5e-5): equal tokens are then no matter of luck."""


def runs_of(model: Path, *names: str) -> list[dict[str, Any]]:
    """Runs of the prompts with these names."""
    return [
        {
            "name": name,
            "prompts": getattr(prompts, name)(model),
            "max_tokens": NUM_TOKENS,
            "one_by_one": name == "shared_prefix",
        }
        for name in names
    ]


def broken_run(model: Path, name: str, fault: str) -> dict[str, Any]:
    """The first tokens of a run, with a fault; it is called like the fault."""
    (run,) = runs_of(model, name)
    return {**run, "name": fault, "fault": fault, "max_tokens": NUM_CONTROL_TOKENS}


def first_tokens(outcome: Outcome, run: str) -> list[list[int]]:
    """As many tokens of a run as a broken run has."""
    return [tokens[:NUM_CONTROL_TOKENS] for tokens in outcome.tokens(run)]


@pytest.fixture(scope="module")
def cpu_attn(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """vLLM as it is, without our platform."""
    folder = tmp_path_factory.mktemp("cpu_attn")
    return run_engine(smollm2, runs_of(smollm2, *RUNS), folder, simulate=False)


@pytest.fixture(scope="module")
def simulated(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Our backend with prefix caching, and a run with a broken mask at the end."""
    control = broken_run(smollm2, "short", "no_causal_mask")
    return run_engine(
        smollm2,
        [*runs_of(smollm2, *RUNS), control],
        tmp_path_factory.mktemp("simulated"),
        enable_prefix_caching=True,
    )


@pytest.fixture(scope="module")
def chunked(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Our backend with chunked prefill."""
    return run_engine(
        smollm2,
        runs_of(smollm2, "batch"),
        tmp_path_factory.mktemp("chunked"),
        enable_chunked_prefill=True,
        max_num_batched_tokens=TOKEN_BUDGET,
    )


@pytest.fixture(scope="module")
def speculative(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Our backend and our drafters one after another, and a run that accepts every draft."""
    control = broken_run(smollm2, "short", "accept_every_draft")
    (rewrite,) = runs_of(smollm2, "rewrite")
    ahead = [{**rewrite, "name": name, "drafter": path} for name, path in PROPOSERS.items()]
    ahead += [{**rewrite, "name": name, **run} for name, run in UNDER_OPTIONS.items()]
    return run_engine(
        smollm2,
        [*runs_of(smollm2, "batch", "rewrite"), control, *ahead],
        tmp_path_factory.mktemp("speculative"),
        # Long enough for any machine: what is late depends on time.
        additional_config={"ascend": {"draft_deadline_ms": 60_000}},
        speculative_config={
            "method": "custom_class",
            "model": "ascend_vllm_plugin.NgramProposer",
            "num_speculative_tokens": NUM_DRAFTS,
        },
    )


@pytest.fixture(scope="module")
def hf(
    smollm2: Path, simulated: Outcome, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What HF says to each output of the simulated engine, by run."""
    names = [
        (run["name"], prompt, output)
        for run in runs_of(smollm2, *RUNS)
        for prompt, output in zip(run["prompts"], simulated.tokens(run["name"]), strict=True)
    ]
    cases = [{"prompt": prompt, "output": output} for _, prompt, output in names]
    said = hf_argmax(smollm2, cases, tmp_path_factory.mktemp("hf"))
    return {
        run: [row for (name, _, _), row in zip(names, said, strict=True) if name == run]
        for run in RUNS
    }


def test_the_reference_is_cpu_attn_in_a_vllm_without_our_platform(cpu_attn: Outcome) -> None:
    assert cpu_attn.result["platform"] == "vllm.platforms.cpu.CpuPlatform"
    assert cpu_attn.result["layers"] == {
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend": NUM_LAYERS
    }


def test_our_backend_computes_every_layer_of_every_step(simulated: Outcome) -> None:
    assert simulated.result["layers"] == {
        "ascend_vllm_plugin.adapters.standard.StandardBackend": NUM_LAYERS
    }
    calls = simulated.result["runs"]["batch"]["calls"]
    # 891 prompt tokens fit into one step, which gives the first of the tokens.
    assert calls == {"forward": NUM_LAYERS * NUM_TOKENS, "write_kv": NUM_LAYERS * NUM_TOKENS}


def test_the_routing_table_names_every_layer(simulated: Outcome) -> None:
    table = read_routing(simulated.folder / "routing.json")
    (row,) = table.rows
    assert (row.kind, row.backend, row.chosen_by) == (
        "target, full attention",
        "standard",
        "selection",
    )
    assert row.layers == tuple(
        f"model.layers.{layer}.self_attn.attn" for layer in range(NUM_LAYERS)
    )
    assert (row.request["num_heads"], row.request["num_kv_heads"]) == (9, 3)
    assert "30 layers -> standard" in simulated.log


@pytest.mark.parametrize("run", RUNS)
def test_tokens_equal_cpu_attn(run: str, cpu_attn: Outcome, simulated: Outcome) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in simulated.tokens(run))
    assert simulated.tokens(run) == cpu_attn.tokens(run)


@pytest.mark.parametrize("run", RUNS)
def test_tokens_equal_hf(run: str, simulated: Outcome, hf: dict[str, list[dict[str, Any]]]) -> None:
    assert [row["tokens"] for row in hf[run]] == simulated.tokens(run)
    assert min(min(row["margins"]) for row in hf[run]) > MIN_MARGIN


def test_a_broken_mask_gives_other_tokens(cpu_attn: Outcome, simulated: Outcome) -> None:
    assert simulated.tokens("no_causal_mask") != first_tokens(cpu_attn, "short")


def test_prefix_caching_reuses_the_blocks_of_the_shared_prefix(simulated: Outcome) -> None:
    first, *others = simulated.result["runs"]["shared_prefix"]["cached"]
    assert first == 0
    assert others == [128] * len(others)


def test_chunked_prefill_gives_the_same_tokens(cpu_attn: Outcome, chunked: Outcome) -> None:
    assert chunked.tokens("batch") == cpu_attn.tokens("batch")


def test_chunked_prefill_takes_the_steps_of_its_budget(chunked: Outcome) -> None:
    least = sum(prompts.BATCH_LENGTHS) // TOKEN_BUDGET + NUM_TOKENS
    assert chunked.steps("batch", NUM_LAYERS) >= least


@pytest.mark.parametrize("run", ["batch", "rewrite"])
def test_speculation_gives_the_same_tokens(
    run: str, cpu_attn: Outcome, simulated: Outcome, speculative: Outcome
) -> None:
    assert speculative.tokens(run) == simulated.tokens(run)
    assert speculative.tokens(run) == cpu_attn.tokens(run)


def accepted_drafts(outcome: Outcome, run: str) -> int:
    """Draft tokens that vLLM accepted in a run, by its own count."""
    return speculation_count(outcome, run, "num_accepted_tokens")


def speculation_count(outcome: Outcome, run: str, name: str) -> int:
    """What a counter of vLLM's speculation gained in a run."""
    counters = outcome.result["runs"][run]["speculation"]
    return int(counters["after"][name] - counters["before"][name])


def our_counts(outcome: Outcome, run: str) -> dict[str, float]:
    """What our background drafter counted in a run."""
    shown = outcome.result["runs"][run]["metrics"]
    return {name.removeprefix("ascend:spec_decode_"): value for name, value in shown.items()}


def test_speculation_accepts_drafts_and_saves_steps(speculative: Outcome) -> None:
    assert accepted_drafts(speculative, "rewrite") > 0
    assert speculative.steps("rewrite", NUM_LAYERS) < NUM_TOKENS


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_drafting_ahead_gives_the_same_tokens(
    proposer: str, cpu_attn: Outcome, speculative: Outcome
) -> None:
    assert speculative.tokens(proposer) == cpu_attn.tokens("rewrite")


@pytest.mark.parametrize("proposer", ["suffix", "lookup", "composite"])
def test_drafting_ahead_accepts_more_than_the_control(proposer: str, speculative: Outcome) -> None:
    assert accepted_drafts(speculative, "wrong") == 0
    assert speculative.steps("wrong", NUM_LAYERS) == NUM_TOKENS
    assert accepted_drafts(speculative, proposer) > NUM_TOKENS / 2
    assert speculative.steps(proposer, NUM_LAYERS) < NUM_TOKENS


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_what_background_drafters_count_is_among_vllms_metrics(
    proposer: str, speculative: Outcome
) -> None:
    counts = our_counts(speculative, proposer)
    assert counts["num_speculative_tokens"] == NUM_DRAFTS
    assert counts["num_late_drafts_total"] == counts["num_draft_errors_total"] == 0
    if proposer == "wrong":
        assert counts["num_ahead_drafts_total"] == 0
        assert counts["num_discarded_drafts_total"] > 0
    else:
        assert counts["num_ahead_drafts_total"] > 0


def seconds_in_the_drafter(outcome: Outcome, run: str) -> list[float]:
    """What each step of a run spent in its background drafter."""
    return [step["seconds"] for step in outcome.result["runs"][run]["draft_steps"]]


def chosen_k(outcome: Outcome, run: str) -> list[int]:
    """What the gauge of a run's background drafter showed, step by step."""
    return [step["k"] for step in outcome.result["runs"][run]["draft_steps"]]


def test_a_drafter_that_is_too_slow_blocks_no_step(cpu_attn: Outcome, speculative: Outcome) -> None:
    """Drafts take 2 seconds, and steps wait for 3 milliseconds: the limit is for busy machines."""
    assert speculative.tokens("slow") == cpu_attn.tokens("rewrite")
    assert our_counts(speculative, "slow")["num_late_drafts_total"] > 0
    seconds = seconds_in_the_drafter(speculative, "slow")
    assert sum(seconds) < len(seconds) * DRAFT_SECONDS / 2


def test_a_slow_drafter_blocks_a_step_that_waits_for_it(speculative: Outcome) -> None:
    """The control of the test above: a deadline that lets drafts come."""
    assert our_counts(speculative, "slow, awaited")["num_late_drafts_total"] == 0
    first, *_ = seconds_in_the_drafter(speculative, "slow, awaited")
    assert first >= DRAFT_SECONDS


@pytest.mark.parametrize("run", ["adaptive", "adaptive, wrong"])
def test_adaptive_k_changes_k_and_no_token(
    run: str, cpu_attn: Outcome, speculative: Outcome
) -> None:
    assert speculative.tokens(run) == cpu_attn.tokens("rewrite")
    assert min(chosen_k(speculative, run)) == 0 < max(chosen_k(speculative, run))
    shown = our_counts(speculative, run)["num_speculative_tokens"]
    assert shown == chosen_k(speculative, run)[-1]


def test_adaptive_k_stops_what_never_pays(speculative: Outcome) -> None:
    always, adaptive = (
        speculation_count(speculative, run, "num_draft_tokens")
        for run in ("wrong", "adaptive, wrong")
    )
    assert 0 < adaptive < always / 2
    assert set(chosen_k(speculative, "wrong")) == {NUM_DRAFTS}


def test_a_verification_that_accepts_everything_gives_other_tokens(
    simulated: Outcome, speculative: Outcome
) -> None:
    assert speculative.tokens("accept_every_draft") != first_tokens(simulated, "short")


def test_the_routing_table_names_the_drafter(speculative: Outcome) -> None:
    table = read_routing(speculative.folder / "routing.json")
    assert table.speculation == {
        "method": "custom_class",
        "drafter": "ascend_vllm_plugin.NgramProposer",
        "tokens": NUM_DRAFTS,
    }

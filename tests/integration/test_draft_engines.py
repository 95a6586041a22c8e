"""GLM-5 with DFlash drafts in real vLLM, half precision, draft layers on the draft flash backend.

A tiny `glm_moe_dsa` target runs alone, with a DFlash draft (wide gate, V1 runner) and with a
DFlash2 draft (strict gate, every term of it true, V1 runner): the tokens are those of transformers
in float32. Drafts with random weights are hardly ever accepted, so a second target comes with
drafts that must agree by their weights (`agreeing_drafts.py`): every draft is accepted, and faults
show what that depends on. One more engine has such a DFlash2 draft on the V2 runner (wide gate).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import attrs
import pytest
from agreeing_drafts import NUM_DRAFTS, agree, answers, edit, make_agreeing_draft
from draft_models import (
    DFLASH,
    DFLASH2,
    LAYERS,
    MASK_TOKEN,
    VOCABULARY,
    make_random_draft,
    make_sturdy_glm,
)
from engines import environment, run_script

from ascend_vllm_plugin import RoutingRow, RoutingTable, read_routing
from ascend_vllm_plugin.routing import parse_routing

pytestmark = pytest.mark.engine

NUM_TOKENS = 48
NUM_V2_TOKENS = 16
"""Fewer on the V2 runner, whose kernels an interpreter runs."""
SEEDS = {20: 149, 47: 138, 130: 6}
"""Length of a prompt -> seed. Of 512 seeds these leave the best logit farthest from the second;
half precision moves the logits by a tenth of that."""
MIN_MARGIN = 0.045
TARGET_LAYERS = [0, 1, 2]
WIDE = {"additional_config": {"ascend": {"draft_flash_attn": "wide"}}}
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
CACHED = {"enable_prefix_caching": True, "block_size": 16}
FAULTS = (
    "third_draft_wrong",
    "rejected_drafts_kept",
    "no_candidate_selection",
    "context_forgotten",
    "block_hidden",
)


def prompts() -> list[list[int]]:
    """Inside a block of 128 tokens and beyond it; the longest outgrows the indexer's choice."""
    found = []
    for length, seed in SEEDS.items():
        generator = random.Random(seed)
        found.append([generator.randrange(3, VOCABULARY - 1) for _ in range(length)])
    return found


def sequel_prompts() -> list[list[int]]:
    """The same, with room for the tokens that follow the last one."""
    return [[*prompt[:-1], prompt[-1] % (MASK_TOKEN - NUM_TOKENS - 1)] for prompt in prompts()]


def engine(name: str, model: Path, runs: list[dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """An engine for the runner."""
    fixed = {
        "model": str(model),
        "dtype": "float16",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    wanted = [{"prompts": prompts(), "max_tokens": NUM_TOKENS, **run} for run in runs]
    return {"name": name, "engine": {**fixed, **arguments}, "runs": wanted}


def speculation(draft: Path) -> dict[str, Any]:
    """The argument that adds a draft."""
    config = {"method": "dflash", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": config}


@attrs.frozen
class Outcome:
    """What the engines of the process left behind."""

    result: dict[str, Any]
    folder: Path

    def tokens(self, engine: str, run: str = "sound") -> list[list[int]]:
        found: list[list[int]] = self.result["engines"][engine]["runs"][run]["tokens"]
        return found

    def calls(self, engine: str) -> int:
        """Calls of the draft backend in all runs of an engine, layer by layer."""
        runs = self.result["engines"][engine]["runs"].values()
        return sum(run["calls"].get("draft_flash", 0) for run in runs)

    def accepted(self, engine: str, run: str = "sound") -> tuple[int, list[int]]:
        """Drafts of a run, and how many were accepted at each position."""
        both = self.result["engines"][engine]["runs"][run]["speculation"]
        before, after = both["before"], both["after"]
        positions = zip(
            after["num_accepted_tokens_per_pos"],
            before["num_accepted_tokens_per_pos"],
            strict=True,
        )
        drafts = after["num_drafts"] - before["num_drafts"]
        return drafts, [now - then for now, then in positions]

    def routing(self, engine: str) -> RoutingTable:
        return read_routing(self.folder / f"{engine}.routing.json")

    def draft(self, engine: str) -> RoutingRow:
        (row,) = (row for row in self.routing(engine).rows if row.role == "draft")
        return row


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All engines."""
    folder = tmp_path_factory.mktemp("drafts")
    target = make_sturdy_glm(folder / "target")
    agreeing = make_sturdy_glm(folder / "agreeing")
    edit(agreeing, agree)
    drafts = {
        "dflash": make_random_draft(folder / "dflash", DFLASH, TARGET_LAYERS),
        "dflash2": make_random_draft(folder / "dflash2", DFLASH2, TARGET_LAYERS),
        "agreeing dflash": make_agreeing_draft(folder / "agreeing1", DFLASH, TARGET_LAYERS),
        "agreeing dflash2": make_agreeing_draft(folder / "agreeing2", DFLASH2, TARGET_LAYERS),
    }
    given = {name: speculation(draft) for name, draft in drafts.items()}
    sound = [{"name": "sound"}]
    sequel = {"prompts": sequel_prompts()}
    faulty = [{"name": fault, "fault": fault, **sequel} for fault in FAULTS]
    engines = [
        engine("alone", target, sound),
        engine("dflash", target, sound, **given["dflash"], **WIDE, **CHUNKED),
        engine("dflash2", target, [*sound, {"name": "again"}], **given["dflash2"], **CACHED),
        engine(
            "agreeing dflash",
            agreeing,
            [{"name": "sound", **sequel}],
            **given["agreeing dflash"],
            **WIDE,
        ),
        engine(
            "agreeing dflash2",
            agreeing,
            [{"name": "sound", **sequel}, *faulty],
            **given["agreeing dflash2"],
        ),
    ]
    reference = {"model": str(target), "engine": "alone"}
    job = {"engines": engines, "reference": reference, "explain": "dflash2"}
    result = run_script("draft_runner.py", job, folder, environment(simulate=True))[0]
    return Outcome(result, folder)


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """An engine on the V2 runner, with a draft that must agree."""
    folder = tmp_path_factory.mktemp("v2")
    agreeing = make_sturdy_glm(folder / "agreeing")
    edit(agreeing, agree)
    draft = speculation(make_agreeing_draft(folder / "draft", DFLASH2, TARGET_LAYERS))
    sequel = {"prompts": sequel_prompts(), "max_tokens": NUM_V2_TOKENS}
    wrong = "third_draft_wrong_on_v2"
    runs = [{"name": "sound", **sequel}, {"name": wrong, "fault": wrong, **sequel}]
    job = {
        "engines": [engine("v2", agreeing, runs, **draft, **WIDE)],
        "reference": {"model": str(agreeing), "engine": "v2"},
        "explain": "v2",
    }
    env = environment(simulate=True, VLLM_USE_V2_MODEL_RUNNER="1")
    return Outcome(run_script("draft_runner.py", job, folder, env)[0], folder)


def test_the_target_alone_gives_the_tokens_of_transformers(outcome: Outcome) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in outcome.tokens("alone"))
    assert [row["tokens"] for row in outcome.result["reference"]] == outcome.tokens("alone")
    assert min(min(row["margins"]) for row in outcome.result["reference"]) > MIN_MARGIN
    assert all(len(set(tokens)) > 15 for tokens in outcome.tokens("alone"))


@pytest.mark.parametrize(
    ("engine", "run"), [("dflash", "sound"), ("dflash2", "sound"), ("dflash2", "again")]
)
def test_drafts_change_no_token(engine: str, run: str, outcome: Outcome) -> None:
    assert outcome.tokens(engine, run) == outcome.tokens("alone")


def test_the_second_run_finds_its_prompts_in_the_cache(outcome: Outcome) -> None:
    runs = outcome.result["engines"]["dflash2"]["runs"]
    assert runs["sound"]["cached"] == [0, 0, 0]
    assert all(cached > 0 for cached in runs["again"]["cached"][1:])


@pytest.mark.parametrize("engine", ["dflash2", "agreeing dflash2"])
def test_every_term_of_the_strict_gate_holds(engine: str, outcome: Outcome) -> None:
    row = outcome.draft(engine)
    assert (row.backend, len(row.layers)) == ("draft_flash", LAYERS)
    assert {term.state for term in row.gate} == {"holds"}
    assert row.request["runner"] == "v1"


def test_the_wide_gate_takes_dflash_and_names_the_term(outcome: Outcome) -> None:
    row = outcome.draft("dflash")
    assert row.backend == "draft_flash"
    assert [term.rule for term in row.relaxations] == ["draft_flash.draft_architecture"]


@pytest.mark.parametrize("engine", ["alone", "dflash", "dflash2"])
def test_the_target_stays_on_sparse_attention(engine: str, outcome: Outcome) -> None:
    rows = {row.kind: row.backend for row in outcome.routing(engine).rows if row.role == "target"}
    assert rows == {"target, full attention": "sfa", "target, indexer": "sfa_indexer"}


def test_layers_share_one_plan_per_step(outcome: Outcome) -> None:
    built = reused = 0
    for name in ("dflash", "dflash2", "agreeing dflash", "agreeing dflash2"):
        steps, rest = divmod(outcome.calls(name), LAYERS)
        assert (rest, steps > 0) == (0, True)
        built, reused = built + steps, reused + (LAYERS - 1) * steps
        plans = outcome.routing(name).plans
        assert plans is not None
        assert (plans.builds, plans.hits, plans.evictions) == (built, reused, 0)


def test_explain_says_what_the_engine_does(outcome: Outcome) -> None:
    explained = parse_routing(json.dumps(outcome.result["explained"]))
    assert explained.rows == outcome.routing("dflash2").rows


@pytest.mark.parametrize("engine", ["agreeing dflash", "agreeing dflash2"])
def test_drafts_that_must_agree_are_all_accepted(engine: str, outcome: Outcome) -> None:
    expected = [answers(prompt, NUM_TOKENS) for prompt in sequel_prompts()]
    assert outcome.tokens(engine) == expected
    drafts, accepted = outcome.accepted(engine)
    assert drafts > 0
    assert accepted == [drafts] * NUM_DRAFTS


def test_drafts_before_a_rejected_one_are_all_accepted(outcome: Outcome) -> None:
    """Rejected drafts leave nothing behind that the next ones could see."""
    assert outcome.tokens("agreeing dflash2", "third_draft_wrong") == outcome.tokens(
        "agreeing dflash2"
    )
    drafts, accepted = outcome.accepted("agreeing dflash2", "third_draft_wrong")
    assert accepted == [drafts, drafts, 0, 0]


@pytest.mark.parametrize(
    ("fault", "most"),
    [
        ("rejected_drafts_kept", 0.5),
        ("no_candidate_selection", 0.0),
        ("context_forgotten", 0.1),
        ("block_hidden", 0.1),
    ],
)
def test_acceptance_shows_what_is_broken_and_tokens_do_not(
    fault: str, most: float, outcome: Outcome
) -> None:
    assert outcome.tokens("agreeing dflash2", fault) == outcome.tokens("agreeing dflash2")
    drafts, accepted = outcome.accepted("agreeing dflash2", fault)
    assert accepted[0] <= most * drafts


def test_the_v2_runner_gives_the_tokens_of_transformers(v2: Outcome) -> None:
    assert v2.tokens("v2") == [answers(prompt, NUM_V2_TOKENS) for prompt in sequel_prompts()]
    assert [row["tokens"] for row in v2.result["reference"]] == v2.tokens("v2")


def test_the_v2_runner_accepts_all_drafts_that_must_agree(v2: Outcome) -> None:
    drafts, accepted = v2.accepted("v2")
    assert drafts > 0
    assert accepted == [drafts] * NUM_DRAFTS


def test_the_v2_runner_accepts_all_drafts_before_a_rejected_one(v2: Outcome) -> None:
    """Rejected drafts leave nothing behind there either."""
    assert v2.tokens("v2", "third_draft_wrong_on_v2") == v2.tokens("v2")
    drafts, accepted = v2.accepted("v2", "third_draft_wrong_on_v2")
    assert drafts > v2.accepted("v2")[0]
    assert accepted == [drafts, drafts, 0, 0]


def test_the_wide_gate_takes_the_v2_runner_and_names_the_term(v2: Outcome) -> None:
    row = v2.draft("v2")
    assert (row.backend, len(row.layers), row.request["runner"]) == ("draft_flash", LAYERS, "v2")
    assert [term.rule for term in row.relaxations] == ["draft_flash.runner"]
    assert {term.state for term in row.gate} == {"holds", "relaxed"}
    assert v2.calls("v2") > 0
    assert parse_routing(json.dumps(v2.result["explained"])).rows == v2.routing("v2").rows

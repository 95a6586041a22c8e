"""The trained DFlash2 draft of the tiny GLM in real vLLM, on the V1 runner and the draft backend.

One process runs the target alone, with its draft, with an untrained draft of the same sizes, and
with the trained one kept off the draft backend. A draft may never change a token; a trained one is
accepted, which drafts with random weights cannot show.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from engines import REPOSITORY, environment, run_script

sys.path.insert(0, str(REPOSITORY / "tools"))

from tiny_glm import corpus, draft_model, train_draft
from transformers import GlmMoeDsaForCausalLM

from ascend_vllm_plugin import RoutingTable, read_routing

pytestmark = pytest.mark.engine

TARGET = REPOSITORY / "assets" / "tiny_glm"
DRAFT = REPOSITORY / "assets" / "tiny_glm_dflash"
NUM_DRAFTED, NUM_TOKENS = 3, 64
PROMPT_LENGTHS = (20, 47, 130, 30, 25, 40)
SLACK = 6
"""Drafts more or fewer than in float32, of about 130: what bfloat16 does to close candidates."""


@attrs.frozen
class Outcome:
    """What the engines of the process left behind."""

    engines: dict[str, Any]
    folder: Path

    def tokens(self, engine: str, run: str = "sound") -> list[list[int]]:
        found: list[list[int]] = self.engines[engine]["runs"][run]["tokens"]
        return found

    def counted(self, engine: str, name: str) -> Any:
        """A counter of speculation over the run."""
        both = self.engines[engine]["runs"]["sound"]["speculation"]
        before, after = (both[when][f"num_{name}"] for when in ("before", "after"))
        if isinstance(after, list):
            return [now - then for now, then in zip(after, before, strict=True)]
        return after - before

    def acceptance(self, engine: str) -> list[float]:
        """Share of the drafts accepted at each position."""
        drafts = self.counted(engine, "drafts")
        return [count / drafts for count in self.counted(engine, "accepted_tokens_per_pos")]

    def routing(self, engine: str) -> RoutingTable:
        return read_routing(self.folder / f"{engine}.routing.json")


def prompts() -> list[list[int]]:
    """Held-out text, one prompt of each length."""
    text = corpus.load(TARGET).validation.tolist()
    return [text[300 * i : 300 * i + length] for i, length in enumerate(PROMPT_LENGTHS)]


def make_untrained(folder: Path) -> Path:
    """A draft of the trained one's sizes with fresh weights."""
    torch.manual_seed(5)
    draft_model.save(draft_model.TinyDraft(draft_model.load(DRAFT).sizes), folder)
    return folder


def engine(
    name: str, draft: Path | None, faults: dict[str, str | None] | None = None, **further: Any
) -> dict[str, Any]:
    arguments = {
        "model": str(TARGET),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        **further,
    }
    if draft is not None:
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": str(draft),
            "num_speculative_tokens": NUM_DRAFTED,
        }
    runs = [
        {"name": run, "prompts": prompts(), "max_tokens": NUM_TOKENS, "fault": fault}
        for run, fault in (faults or {"sound": None}).items()
    ]
    return {"name": name, "engine": arguments, "runs": runs}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("dflash")
    broken = {"sound": None, "broken": "accept_every_draft"}
    off = {"additional_config": {"ascend": {"draft_flash_attn": "off"}}}
    engines = [
        engine("plain", None),
        engine("trained", DRAFT),
        engine("untrained", make_untrained(folder / "untrained_dflash"), broken),
        engine("off", DRAFT, **off),
    ]
    job = {"models": {}, "engines": engines, "reference": []}
    result, _ = run_script("latent_runner.py", job, folder, environment(True))
    return Outcome(result["engines"], folder)


def replayed(outcome: Outcome, late: bool = False) -> tuple[int, list[int]]:
    """Drafts, and accepted tokens per position, of the trained draft in torch over vLLM's tokens.

    The draft is the module that was trained, in float32, on hidden states of transformers' target.

    Args:
        outcome: where the tokens are.
        late: every state stands one position late, as a wrong slot mapping might have it.
    """
    target = GlmMoeDsaForCausalLM.from_pretrained(
        TARGET, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    frozen = train_draft.Frozen(embedding.detach(), head.detach())
    draft = draft_model.load(DRAFT)
    drafts, accepted = 0, [0] * NUM_DRAFTED
    for prompt, output in zip(prompts(), outcome.tokens("trained"), strict=True):
        tokens = torch.tensor([prompt + output])
        states = train_draft.layer_outputs(target, tokens)
        if late:
            states = states.roll(1, dims=1)
        anchors = torch.arange(len(prompt), tokens.shape[1])[None]
        guesses = train_draft.drafted(draft, frozen, train_draft.Texts(tokens, states), anchors)[
            0
        ].tolist()
        emitted = 1
        while emitted < len(output):
            pairs = zip(guesses[emitted - 1], output[emitted:], strict=False)
            right = next((n for n, (a, b) in enumerate(pairs) if a != b), NUM_DRAFTED)
            right = min(right, len(output) - emitted)
            drafts += 1
            accepted = [count + (place < right) for place, count in enumerate(accepted)]
            emitted += right + 1
    return drafts, accepted


@pytest.mark.parametrize("name", ["trained", "untrained", "off"])
def test_a_draft_changes_no_token(outcome: Outcome, name: str) -> None:
    assert outcome.tokens(name) == outcome.tokens("plain")
    assert [len(tokens) for tokens in outcome.tokens(name)] == [NUM_TOKENS] * len(PROMPT_LENGTHS)


def test_without_verification_tokens_would_change(outcome: Outcome) -> None:
    assert outcome.tokens("untrained", "broken") != outcome.tokens("plain")


def test_the_trained_draft_is_accepted_and_the_untrained_one_is_not(outcome: Outcome) -> None:
    trained, untrained = outcome.acceptance("trained"), outcome.acceptance("untrained")
    assert trained[0] > 0.5
    assert untrained[0] < 0.1
    assert trained == sorted(trained, reverse=True)
    assert trained[-1] > untrained[0]


def test_the_draft_is_on_its_backend_by_the_strict_gate(outcome: Outcome) -> None:
    table = outcome.routing("trained")
    (row,) = [row for row in table.rows if row.role == "draft"]
    assert (row.backend, len(row.layers)) == ("draft_flash", 2)
    assert {term.state for term in row.gate} == {"holds"}
    assert table.plans is not None
    # The second layer uses the plan that the first one built.
    assert table.plans.per_step == 1
    assert table.plans.builds == table.plans.hits > 0


def test_switched_off_the_draft_is_on_the_backend_of_the_table(outcome: Outcome) -> None:
    table = outcome.routing("off")
    (row,) = [row for row in table.rows if row.role == "draft"]
    assert (row.backend, table.plans) == ("standard", None)
    assert [term.rule for term in row.gate if term.broken] == ["draft_flash.mode"]


def test_acceptance_is_that_of_the_module_that_was_trained(outcome: Outcome) -> None:
    drafts, accepted = replayed(outcome)
    found = outcome.counted("trained", "accepted_tokens_per_pos")
    assert abs(outcome.counted("trained", "drafts") - drafts) <= SLACK
    assert all(abs(a - b) <= SLACK for a, b in zip(accepted, found, strict=True))


def test_states_one_position_late_would_show(outcome: Outcome) -> None:
    drafts, _ = replayed(outcome, late=True)
    assert drafts > outcome.counted("trained", "drafts") + SLACK

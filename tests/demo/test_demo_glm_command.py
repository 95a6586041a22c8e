"""`tools/demo_glm.py` as a command, with the fake server where vLLM would be."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from ascend_demo.glm import DRAFT, TARGET, VARIANTS, server_command
from commands import BAD_ARGUMENTS, FAILURES, DemoCommand, work_of
from fakes import all_gone, pids_of

DEMO = DemoCommand("run_demo_glm_with_fake.py")
NAMES = [variant.name for variant in VARIANTS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    done = DEMO.run(folder, "ok", "--json", str(folder / "report.json"))
    assert done.returncode == 0, done.stderr
    assert all_gone(pids_of(folder))
    assert not work_of(folder).exists()
    report = json.loads((folder / "report.json").read_text())
    outcomes = {outcome["variant"]["name"]: outcome for outcome in report["outcomes"]}
    return {"out": done.stdout, "report": report, "outcomes": outcomes}


def test_report_holds_what_each_server_said(whole: dict[str, Any]) -> None:
    assert list(whole["outcomes"]) == NAMES
    assert whole["report"]["ran_on"] == "simulated A5 on CPU"
    for name, outcome in whole["outcomes"].items():
        assert [answer["text"] for answer in outcome["answers"]] == ["Paris is the capital."] * 3
        assert outcome["same_texts"] == 3
        assert outcome["steps"] == 4 * 5  # the warm-up is a request too
        each = [
            (answer["seconds"] - answer["seconds_to_first_token"]) / 2
            for answer in outcome["answers"]
        ]
        assert outcome["seconds_per_token"] == pytest.approx(sum(each) / 3)
        # Of the three prompts alone: what the warm-up drafted does not count.
        accepted = [] if name == "plain" else [0.75, 0.25]
        assert outcome["acceptance_per_position"] == accepted
        assert outcome["acceptance_length"] == (None if name == "plain" else 2.0)


def test_plans_are_those_at_the_end(whole: dict[str, Any]) -> None:
    plans = {name: outcome["plans"] for name, outcome in whole["outcomes"].items()}
    assert plans.pop("dflash") == {
        "layers": 2, "per_step": 1, "builds": 21, "hits": 21, "evictions": 0,
    }  # fmt: skip
    assert set(plans.values()) == {None}


def test_every_term_is_told_for_target_and_draft(whole: dict[str, Any]) -> None:
    broken = {}
    for name, outcome in whole["outcomes"].items():
        for kind, terms in outcome["gate"].items():
            kinds = [term["kind"] for term in terms]
            assert (kinds.count("condition"), kinds.count("exclusion")) == (7, 5)
            wrong = [term["rule"] for term in terms if term["state"] == "broken"]
            broken[name, kind.split(",")[0]] = wrong
    assert broken["dflash", "draft"] == []
    assert broken["dflash-off", "draft"] == ["draft_flash.mode"]
    assert "draft_flash.architecture" in broken["mtp", "draft"]
    assert all("draft_flash.role" in broken[name, "target"] for name in NAMES)


def test_tables_are_printed(whole: dict[str, Any]) -> None:
    for part in (
        "Draft gate for: draft, full attention (taken)",
        "Draft gate for: draft, full attention (refused by 1 term)",
        "condition 7",
        "exclusion 5",
        "draft_flash",
        "Paris is the capital.",
        "75%",
        "no drafts",
        "3 of 3",
        "simulated: this ran on a CPU",
        "tiny-model figures say nothing about GLM-5",
    ):
        assert part in whole["out"], part


def test_a_profile_without_the_operator_shows_the_reason(tmp_path: Path) -> None:
    done = DEMO.run(tmp_path, "ok", "--profile", "A2", "--variant", "dflash")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "flash_attn with device" in line]
    assert ["broken" in line for line in lines] == [True, True]  # target and draft
    assert "no plans" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        *BAD_ARGUMENTS,
        (("--draft", "/no/such/draft"), 1, "--draft: found /no/such/draft without config.json"),
        (("--draft", str(TARGET)), 1, "--draft: found architectures ['GlmMoeDsaForCausalLM']"),
        (("--variant", "eagle"), 2, "invalid choice: 'eagle'"),
    ],
)
def test_bad_arguments_start_nothing(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    DEMO.assert_starts_nothing(tmp_path, arguments, code, message)


@pytest.mark.parametrize(
    ("mode", "code", "message"), [*FAILURES, ("no-metrics", 5, "request 'warm-up' failed")]
)
def test_failures_end_with_their_code(tmp_path: Path, mode: str, code: int, message: str) -> None:
    DEMO.assert_fails(tmp_path, mode, code, message, "--variant", "dflash")


def test_ctrl_c_while_a_server_starts_ends_it(tmp_path: Path) -> None:
    with DEMO.started(tmp_path, "hang") as process:
        pids = pids_of(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert all_gone(pids)
    assert not work_of(tmp_path).exists()
    assert "interrupted; the server was ended" in (tmp_path / "out").read_text()


def option(words: tuple[str, ...], name: str) -> Any:
    return json.loads(words[words.index(name) + 1]) if name in words else None


def test_servers_differ_in_their_draft_alone() -> None:
    words = {variant.name: server_command(variant, DRAFT, 1) for variant in VARIANTS}
    speculation = {name: option(found, "--speculative-config") for name, found in words.items()}
    assert speculation["plain"] is None
    assert speculation["mtp"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert speculation["dflash"] == speculation["dflash-off"]
    assert speculation["dflash"]["model"] == str(DRAFT)
    gates = {name: option(found, "--additional-config") for name, found in words.items()}
    assert gates["dflash"] == {"ascend": {"draft_flash_attn": "strict"}}
    assert gates["dflash-off"] == {"ascend": {"draft_flash_attn": "off"}}

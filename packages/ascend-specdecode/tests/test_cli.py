from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_specdecode import cli, simulate_command
from ascend_specdecode.cli import build_parser, main
from ascend_specdecode.simulator import RunResult


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SMALL = ("simulate", "--speed", "--requests", "4", "--tokens", "30", "--prompt", "16")


def test_a_campaign(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "--runs", "20", "--seed", "5")
    assert code == 0
    assert "runs with violations" in out
    code, out, _ = run(capsys, "simulate", "--runs", "20", "--seed", "5", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["runs"] == 20
    assert document["failed"] == []
    assert sum(document["endings"].values()) > 20


def test_a_failing_seed_is_printed_with_its_replay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(seed: int, *_: Any, **__: Any) -> RunResult:
        violations = ("request-0: a token is missing",) if seed == 7 else ()
        return RunResult(seed, "asyncio", violations, {}, 0, 1.0)

    monkeypatch.setattr("ascend_specdecode.simulator.campaigns.run", failing)
    code, out, _ = run(capsys, "simulate", "--seed", "5", "--runs", "5")
    assert code == 1
    assert "seed 7 (asyncio): request-0: a token is missing" in out
    assert "replay: ascend-specdecode simulate --seed 7 --backend asyncio --replay" in out
    code, out, _ = run(capsys, "simulate", "--seed", "5", "--runs", "5", "--json")
    assert code == 1
    (failed,) = json.loads(out)["failed"]
    assert failed["replay"] == "ascend-specdecode simulate --seed 7 --backend asyncio --replay"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_replay_tells_what_happened(capsys: pytest.CaptureFixture[str], backend: str) -> None:
    arguments = ("simulate", "--seed", "11", "--backend", backend, "--replay")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert f"seed 11 on {backend}" in out
    assert "settings: EngineConfig(" in out
    assert "request-0" in out
    assert out.rstrip().endswith("everything held")
    code, out, _ = run(capsys, *arguments, "--json")
    assert json.loads(out)["log"]


def test_schedules_are_compared_in_one_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    code, out, _ = run(capsys, *SMALL, "--trace", str(file), "--json")
    document = json.loads(out)
    assert code == 0
    assert document["simulated"] is True
    assert document["soc"] == "Ascend950PR_9599"
    schedules = document["schedules"]
    assert schedules["k = 0"]["speed_up"] == pytest.approx(1.0)
    for name, schedule in schedules.items():
        assert schedule["tokens"] == 120, name
        plain = schedules["k = 0"]["tokens_per_second"]
        assert schedule["speed_up"] == pytest.approx(schedule["tokens_per_second"] / plain)
    assert json.loads(file.read_text())["traceEvents"]
    code, out, _ = run(capsys, *SMALL)
    assert code == 0
    assert "(simulated)" in out
    assert "adaptive, pipelined" in out


def test_a_useless_drafter_shows_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *SMALL, "--acceptance", "0", "--json")
    schedules = json.loads(out)["schedules"]
    assert schedules["lockstep"]["speed_up"] < 0.9
    assert schedules["adaptive"]["speed_up"] > schedules["lockstep"]["speed_up"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--runs", "0"), "--runs: found 0, allowed at least 1"),
        ((*SMALL, "--profile", "A7"), "unknown SoC 'A7'"),
        ((*SMALL, "--profile", "A3"), "no source states it for Ascend910_9391"),
        ((*SMALL, "--target", "gpt-9"), "model: found 'gpt-9', allowed one of"),
        ((*SMALL, "--acceptance", "2"), "--acceptance: found 2.0, allowed a number in 0..1"),
        ((*SMALL, "--k", "-1"), "num_speculative_tokens: found -1"),
        ((*SMALL, "--requests", "0"), "requests: found 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("ascend-specdecode: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--replay", "--speed", "--json"])
def test_a_missing_event_loop_is_bad_input_and_no_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setitem(sys.modules, "trio", None)
    code, out, err = run(capsys, "simulate", "--backend", "trio", option)
    assert (code, out) == (2, "")
    assert "backend: found 'trio', allowed 'asyncio', as trio is not installed" in err


@pytest.mark.parametrize("arguments", [(), ("fly",), ("simulate", "--backend", "curio")])
def test_bad_usage_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: ascend-specdecode" in capsys.readouterr().err


def test_every_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    for arguments in ([], ["simulate"]):
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args([*arguments, "--help"])
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        examples = [
            line.split("   ")[0].split()[1:]
            for line in map(str.strip, shown.splitlines())
            if line.startswith("ascend-specdecode simulate") and "[-h]" not in line
        ]
        assert examples
        for example in examples:
            assert parser.parse_args(example).command == "simulate"
        assert "exit codes:" in shown


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ascend_specdecode", "simulate", "--runs", "2", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout)["runs"] == 2
    assert simulate_command.add in cli.COMMANDS

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import fastjsonschema
import pytest

from ascend_hwprofile.catalog import schema_text
from ascend_hwprofile.cli import build_parser, main

SCHEMA = json.loads(schema_text("cli"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run with --json and check the output against the form documented for the command."""
    code, out, _ = run(capsys, *arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    form = "error" if "error" in found else arguments[0]
    fastjsonschema.validate({**SCHEMA, "$ref": f"#/definitions/{form}"}, found)
    assert found["command"] == arguments[0]
    assert code in (0, 1)
    return found


COMMANDS = [
    ("list",),
    ("show", "A5"),
    ("diff", "A3", "A5"),
    ("why", "910B3", "flash_attn", "mla"),
    ("detect",),
    ("doctor",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_json_follows_the_schema(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert document(capsys, *command)["schema_version"] == 1


def test_the_schema_refuses_something() -> None:
    with pytest.raises(fastjsonschema.JsonSchemaException):
        fastjsonschema.validate(
            {**SCHEMA, "$ref": "#/definitions/show"}, {"command": "show", "schema_version": 1}
        )


def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = document(capsys, "show", "Ascend910B4")
    assert {
        name: shown[name]
        for name in ("family", "soc_name", "npu_arch", "cube_cores", "vector_cores", "clock_mhz")
    } == {
        "family": "A2",
        "soc_name": "Ascend910B4",
        "npu_arch": 2201,
        "cube_cores": 20,
        "vector_cores": 40,
        "clock_mhz": 1500,
    }
    assert (shown["memory_bytes"], shown["l2_bytes"]) == (32 * 2**30, 96 * 2**20)
    assert shown["dtypes"] == ["bfloat16", "float16", "int4", "int8"]
    assert shown["peak_tflops"]["float16"] == pytest.approx(245.76)
    assert "mla" in shown["capabilities"]
    assert "device_length_flash_attn" in shown["missing"]
    assert shown["figures"]["cube_cores"]["confidence"] == "vendor"


def test_show_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", "910_9363")
    assert (code, err) == (0, "")
    assert "24 in PyPTO" in out
    assert "unverified" in out
    assert "\x1b" not in out


def test_what_a3_cannot_do_that_a5_can(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "diff", "A3", "A5")
    assert code == 0
    lacking = out.split("What Ascend910_9391 cannot do and Ascend950PR_9599 can:")[1]
    lacking = lacking.split("What Ascend950PR_9599 cannot do")[0]
    for ability in ("device_length_flash_attn", "float8", "simt", "dtype mxfp4"):
        assert ability in lacking
    assert "int4_cube" not in lacking


def test_diff_with_itself_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "diff", "A5", "950PR_9599")
    empty = {"capabilities": {}, "dtypes": {}}
    assert (found["figures"], found["operators"]) == ({}, {})
    assert (found["left_lacks"], found["right_lacks"]) == (empty, empty)


def test_why_flash_attn_is_refused_on_910b3(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "why", "910B3", "flash_attn")
    assert (code, err) == (0, "")
    assert out.startswith("operator flash_attn on Ascend910B3 (A2): no: ")
    assert "Ascend950PR and Ascend950DT only" in out


def test_why_capability_and_prefixed_operator(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "why", "A5", "DSA", "npu_mla_prolog_v2", "attention_update")
    answers = {one["name"]: (one["kind"], one["supported"]) for one in found["answers"]}
    assert answers == {
        "dsa": ("capability", True),
        "mla_prolog_v2": ("operator", False),
        "attention_update": ("operator", None),
    }


def test_why_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "why", "A5", "flsh")
    assert (code, out) == (1, "")
    assert "unknown operator or capability 'flsh'; operators: sparse_flash_attention" in err


def test_list_has_every_soc_and_can_be_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "list")
    assert "Ascend910B4-1" in out
    assert "refused" in out
    narrowed = document(capsys, "list", "--family", "A3")
    assert {soc["family"] for soc in narrowed["socs"]} == {"A3"}
    assert len(narrowed["socs"]) == 7


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("show", "910B"), "first generation"),
        (("show", "Ascend910B7"), "nearest known names"),
        (("diff", "A2", "gen1"), "first generation"),
        (("why", "nothing", "mla"), "unknown SoC"),
        (("doctor", "--built-for", "x9"), "unknown SoC"),
    ],
)
def test_refused_soc(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("ascend-hwprofile: ")
    assert reason in err
    assert reason in document(capsys, *arguments)["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("show",),
        ("shw", "A2"),
        ("list", "--family", "A9"),
        ("detect", "--timeout", "0"),
        ("detect", "--timeout", "nan"),
        ("detect", "--timeout", "soon"),
        ("completion", "fish"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: ascend-hwprofile" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", *(command[0] for command in COMMANDS)])
def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*filter(None, [command]), "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "example" in out
    assert "exit codes:" in out


def test_detect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", "310P")
    code, out, err = run(capsys, "detect")
    assert (code, err) == (0, "")
    assert "This machine: Ascend310P3, family 310P (simulated" in out
    assert document(capsys, "detect")["profile"]["soc_name"] == "Ascend310P3"
    monkeypatch.setenv("ASCEND_HWPROFILE", "910B")
    code, out, err = run(capsys, "detect", "--timeout", "2")
    assert code == 1
    assert "first generation" in err


def test_doctor_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", "A5")
    code, out, err = run(capsys, "doctor", "--built-for", "ascend950")
    assert "built for ascend950, fits" in out
    code, out, err = run(capsys, "doctor", "--built-for", "ascend910b")
    assert code == 1
    assert "built for ascend910b (A2), but this machine has Ascend950PR_9599" in out
    assert "problem(s) found" in err
    assert document(capsys, "doctor", "--built-for", "ascend910b")["exit_code"] == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rich_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["why", "A2", "mla"]) == 0
    assert main(["list", "--family", "A2"]) == 0
    assert "─" in screen.getvalue()
    assert "Ascend910B4-1" in screen.getvalue()


def test_plain_tables_on_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["list", "--family", "A2"]) == 0
    assert "─" not in screen.getvalue()
    assert "Ascend910B4-1" in screen.getvalue()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    code, out, _ = run(capsys, "completion", shell)
    assert code == 0
    assert "doctor" in out


def test_completion_without_shtab(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = run(capsys, "completion", "bash")
    assert (code, out) == (1, "")
    assert "pip install 'ascend-hwprofile[completion]'" in err


def test_schema_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "schema")
    assert code == 0
    assert set(json.loads(out)["definitions"]) >= {command[0] for command in COMMANDS}


def test_module_runs() -> None:
    command = [sys.executable, "-m", "ascend_hwprofile", "show", "910B"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "first generation" in done.stderr


def test_piped_show_loads_no_rich() -> None:
    code = (
        "import sys; from ascend_hwprofile.cli import main; main(['show', 'A5', '--json']);"
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["soc_name"] == "Ascend950PR_9599"
    assert "'attr'" in done.stderr
    assert "'rich'" not in done.stderr


def test_parser_is_named_after_the_command() -> None:
    assert build_parser().prog == "ascend-hwprofile"

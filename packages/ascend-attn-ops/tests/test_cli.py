from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ascend_attn_ops as ops
from ascend_attn_ops.cli import main
from ascend_attn_ops.selection import common_rules


def case() -> dict[str, Any]:
    return dict(next(ops.scatter_pa_kv_cache.samples()).data)


@pytest.fixture
def write(tmp_path: Path):
    def write_case(data: Any) -> str:
        path = tmp_path / "case.json"
        path.write_text(json.dumps(data))
        return str(path)

    return write_case


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_an_accepted_case(write: Any, capsys: Any) -> None:
    code, out, _ = run(
        capsys, "check", "scatter_pa_kv_cache", "--profile", "A3", write(case()), "--json"
    )
    assert code == 0
    assert json.loads(out) == {"verdict": "accept", "refusals": []}


def test_a_refused_case_says_everything(write: Any, capsys: Any) -> None:
    bad = case() | {"cache_mode": "ND"}
    code, out, _ = run(capsys, "check", "scatter_pa_kv_cache", write(bad), "--json")
    verdict = json.loads(out)
    assert (code, verdict["verdict"]) == (1, "refuse")
    (refusal,) = verdict["refusals"]
    assert set(refusal) == {"rule", "parameter", "found", "allowed", "source", "cann_code"}
    assert (refusal["rule"], refusal["cann_code"]) == ("scatter_pa_kv_cache.cache_mode", 161002)


def test_the_profile_comes_from_the_environment_unless_it_is_given(
    write: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = next(s for s in ops.operator_named("flash_attn").samples() if not s.rules)
    monkeypatch.setenv("ASCEND_HWPROFILE", "A3")  # flash_attn is an A5 operator
    code, out, _ = run(capsys, "check", "flash_attn", write(dict(sample.data)), "--json")
    assert (code, json.loads(out)["refusals"][0]["rule"]) == (1, "product")
    given = ("check", "flash_attn", write(dict(sample.data)), "--profile", "A5")
    assert run(capsys, *given)[0] == 0
    monkeypatch.setenv("ASCEND_HWPROFILE", "A9")
    code, _, err = run(capsys, "check", "flash_attn", write(dict(sample.data)))
    assert code == 2
    assert "A9" in err


def test_a_list_of_cases_gives_verdicts_in_order(write: Any, capsys: Any) -> None:
    cases = [case(), case() | {"cache_mode": "ND"}, {}]
    code, out, _ = run(capsys, "check", "scatter_pa_kv_cache", write(cases), "--json")
    assert code == 0
    verdicts = json.loads(out)
    assert [verdict["verdict"] for verdict in verdicts] == ["accept", "refuse", "refuse"]
    assert {refusal["cann_code"] for refusal in verdicts[2]["refusals"]} == {161001}


def test_standard_input(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(case())))
    assert run(capsys, "check", "scatter_pa_kv_cache", "-")[0] == 0


@pytest.mark.parametrize(
    ("argv", "data", "text"),
    [
        (("check", "nothing"), {}, "unknown operator 'nothing'; known: "),
        (("check", "scatter_pa_kv_cache", "--profile", "A9"), {}, "A9"),
        (("check", "scatter_pa_kv_cache", "--provider", "gpu"), {}, "unknown provider 'gpu'"),
        (("check", "scatter_pa_kv_cache"), {"keys": 1}, "unknown arguments keys; known: key, "),
        (
            ("check", "scatter_pa_kv_cache"),
            {"key": 1},
            "a tensor is an object with shape and dtype",
        ),
        (("check", "scatter_pa_kv_cache"), [1], "case 0 is not an object"),
        (
            ("check", "scatter_pa_kv_cache"),
            {"key": {"shape": [2], "dtype": "half2"}},
            "unknown dtype 'half2'",
        ),
        (
            ("check", "scatter_pa_kv_cache"),
            {"key": {"shape": [-2], "dtype": "float16"}},
            "list of integers >= 0",
        ),
        (
            ("check", "scatter_pa_kv_cache"),
            {"key": {"shape": [10**20], "dtype": "float16"}},
            "key: shape [100000000000000000000] is larger than any tensor",
        ),
        (
            ("check", "scatter_pa_kv_cache"),
            {"key": {"shape": [2**62, 4], "dtype": "float16", "strides": [4, 1]}},
            "with strides [4, 1] is larger than any tensor",
        ),
        (("check", "scatter_pa_kv_cache"), {"cache_mode": 3}, "cache_mode: found 3, expected str"),
    ],
)
def test_bad_usage_names_the_thing(
    argv: tuple[str, ...], data: Any, text: str, write: Any, capsys: Any
) -> None:
    code, out, err = run(capsys, *argv, write(data))
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_null_is_the_value_none_of_an_optional_argument(write: Any, capsys: Any) -> None:
    """None means Norm for cache_mode, whose default is another."""
    for cache_mode, verdict in ((None, 0), ("Norm", 0), ("PA_NZ", 1)):
        data = case() | {"cache_mode": cache_mode}
        assert run(capsys, "check", "scatter_pa_kv_cache", write(data))[0] == verdict


@pytest.mark.parametrize("text", ["[" * 100_000, '{"cache_mode": ' + "9" * 5000 + "}"])
def test_files_that_the_json_reader_gives_up_on(text: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "case.json").write_text(text)
    code, out, err = run(capsys, "check", "scatter_pa_kv_cache", str(tmp_path / "case.json"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is not JSON" in err


def test_missing_and_broken_files(tmp_path: Path, capsys: Any) -> None:
    code, _, err = run(capsys, "check", "scatter_pa_kv_cache", str(tmp_path / "none.json"))
    assert (code, "No such file" in err) == (2, True)
    (tmp_path / "broken.json").write_text("{")
    code, _, err = run(capsys, "check", "scatter_pa_kv_cache", str(tmp_path / "broken.json"))
    assert (code, "is not JSON" in err) == (2, True)


def test_every_rule_can_be_shown(capsys: Any) -> None:
    rules = [rule.id for op in ops.all_operators() for rule in op.contract.rules]
    for name in (*rules, *common_rules()):
        code, out, _ = run(capsys, "show", name, "--json")
        shown = json.loads(out)
        assert (code, shown["rule"]) == (0, name)
        assert shown["allowed"]
        assert shown["source"]


def test_unknown_rule_lists_the_known(capsys: Any) -> None:
    code, _, err = run(capsys, "show", "scatter_pa_kv_cache.colour")
    assert code == 2
    assert "scatter_pa_kv_cache.cache_mode" in err


@pytest.mark.parametrize("command", ["list", "matrix", "info"])
def test_tables_name_every_operator_or_provider(command: str, capsys: Any) -> None:
    code, out, _ = run(capsys, command)
    assert code == 0
    names = ("torch_npu", "reference") if command == "info" else ("scatter_pa_kv_cache",)
    assert all(name in out for name in names)
    code, out, _ = run(capsys, command, "--json")
    assert code == 0
    assert isinstance(json.loads(out), list)


def test_show_operator(capsys: Any) -> None:
    code, out, _ = run(capsys, "show", "scatter_pa_kv_cache")
    assert code == 0
    assert "Tensor(a!) key_cache" in out
    code, out, _ = run(capsys, "show", "scatter_pa_kv_cache", "--json")
    assert json.loads(out)["parameters"][0]["name"] == "key"


def test_a_reader_that_stops_is_no_error() -> None:
    command = [sys.executable, "-m", "ascend_attn_ops", "show", "fused_infer_attention_score"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""

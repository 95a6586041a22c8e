from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text("utf-8"), re.DOTALL
)


def output_of(number: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    exec(compile(EXAMPLES[number], "README.md", "exec"), {})  # noqa: S102 - our own README
    return capsys.readouterr().out.splitlines()


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(0, capsys)
    assert lines[0].endswith(": standard")
    assert lines[-2:] == ["(2,)", "torch.Size([10, 32, 128])"]


def test_the_context_parallel_example_prints_what_its_comment_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = output_of(1, capsys)
    assert EXAMPLES[1].rstrip().endswith(f"# {line}")


def test_the_plan_example_prints_what_its_comment_says(capsys: pytest.CaptureFixture[str]) -> None:
    (number,) = (n for n, text in enumerate(EXAMPLES) if "get_dsa_attn_kv_plan" in text)
    (line,) = output_of(number, capsys)
    assert EXAMPLES[number].rstrip().endswith(f"# {line}")


def test_the_captured_step_example_prints_what_its_comment_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (number,) = (n for n, text in enumerate(EXAMPLES) if "graph.replay()" in text)
    (line,) = output_of(number, capsys)
    assert EXAMPLES[number].rstrip().endswith(f"# {line}")


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == 4

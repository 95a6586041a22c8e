from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})  # noqa: S102 - our own README
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": standard")
    assert lines[-2:] == ["(2,)", "torch.Size([10, 32, 128])"]

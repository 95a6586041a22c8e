from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
HERE = [example for example in EXAMPLES if "ascend_specdecode.hf" not in example]
# The other one needs a model: tests/integration/test_specdecode_tiny_glm.py of the repository.


def output(example: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


def test_the_first_example_runs() -> None:
    lines = output(HERE[0])
    assert lines[0].startswith("Tokens(name='0', tokens=(")
    assert lines[-1].startswith("Finished(name='0'")


def test_a_model_of_your_own_counts() -> None:
    (line,) = output(HERE[1])
    assert line.startswith("(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19) Finished(")


@pytest.mark.parametrize("number", range(2, len(HERE)))
def test_the_other_examples_run(number: int) -> None:
    assert output(HERE[number]) == []


def test_all_examples_are_tested_somewhere() -> None:
    assert len(HERE) >= 3
    assert len(EXAMPLES) == len(HERE) + 1

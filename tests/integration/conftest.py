"""Fixtures that several files share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

# pytest's importlib mode does not make the modules beside a test importable.
sys.path.insert(0, str(Path(__file__).parent))

from engines import REPOSITORY, environment, run_python, run_script
from several_engines import Outcome, run_on_ranks
from tiny_engines import JUDGED, MODELS, rank_engines, single_engines


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2, made by the tool of the repository unless it is there."""
    tool = REPOSITORY / "tools" / "smollm2.py"
    done = run_python([str(tool), "make", "--json"], dict(os.environ), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(json.loads(done.stdout)["path"])


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny models; the process with the engines on one rank makes them."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def single(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the tiny engines on one rank left."""
    folder = tmp_path_factory.mktemp("single")
    models = {str(tiny_models / name): maker for name, maker in MODELS.items()}
    job = {"models": models, "engines": single_engines(tiny_models), "reference": JUDGED}
    result, _ = run_script("latent_runner.py", job, folder, environment(True))
    return Outcome(result, folder)


@pytest.fixture(scope="session")
def ranks(
    single: Outcome, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Outcome]:
    """What each of two ranks left of the tiny engines that they ran together."""
    return run_on_ranks(rank_engines(tiny_models), tmp_path_factory.mktemp("ranks"))

"""Fixtures that several files share."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

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


NUMBA = {"NUMBA_THREADING_LAYER": "workqueue"}
"""vLLM's own n-gram drafter starts numba's threads. After that, with numba's default layer, a later
engine with MTP gives other tokens in the same process; seen with vLLM 0.30 and numba 0.65."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Whether the caller is to fill the folder; another worker waits until that is done."""
    with FileLock(f"{folder}.lock"):
        finished = folder / "finished"
        wanted = not finished.is_file()
        if wanted:
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
        yield wanted
        finished.touch()


@pytest.fixture(scope="session")
def tiny_models(shared: Path) -> Path:
    """Folder of the tiny models; the process with the engines on one rank makes them."""
    folder = shared / "models"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def single(shared: Path, tiny_models: Path) -> Outcome:
    """What the tiny engines on one rank left."""
    folder = shared / "single"
    models = {str(tiny_models / name): maker for name, maker in MODELS.items()}
    with made_once(folder) as wanted:
        if wanted:
            job = {"models": models, "engines": single_engines(tiny_models), "reference": JUDGED}
            run_script("latent_runner.py", job, folder, environment(True, **NUMBA))
    return Outcome.left_in(folder)


@pytest.fixture(scope="session")
def ranks(single: Outcome, shared: Path, tiny_models: Path) -> list[Outcome]:
    """What each of two ranks left of the tiny engines that they ran together."""
    folder = shared / "ranks"
    with made_once(folder) as wanted:
        if wanted:
            run_on_ranks(rank_engines(tiny_models), folder)
    return [Outcome.left_in(folder / f"rank{rank}") for rank in range(2)]

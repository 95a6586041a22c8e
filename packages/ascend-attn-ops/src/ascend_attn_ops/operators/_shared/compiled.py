"""Whether loops over the memory of tensors can be compiled: by numba, where it is installed.

A decode step of a few requests is little work in many places. Where torch needs a call or several
for each place, one compiled loop needs one for all of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

Kernel = Callable[..., int]
"""Takes addresses of memory that its caller has checked, and returns a number."""

SWITCH = "NUMBA_DISABLE_JIT"
_LOOPS: list[Callable[[], Kernel | None]] = []
_LOGGER = logging.getLogger(__name__)


@cache
def compiles() -> bool:
    """Whether numba is installed, and not switched off by its own variable."""
    return find_spec("numba") is not None and os.environ.get(SWITCH, "0") in ("", "0")


def compiled_loop(load: Callable[[], Kernel]) -> Callable[[], Kernel | None]:
    """Decorator: the loop that ``load`` imports, or None where nothing compiles it.

    The first call of it may take seconds; numba keeps its result on disk.
    """

    @cache
    def loaded() -> Kernel | None:
        if not compiles():
            return None
        start = time.perf_counter()
        loop = load()
        _LOGGER.info("%s: ready after %.1f s", load.__module__, time.perf_counter() - start)
        return loop

    _LOOPS.append(loaded)
    return loaded


def compile_loops() -> bool:
    """Compile what the host providers compile, so that no step has to wait for it.

    The first run takes seconds; numba keeps the result on disk, and further runs read it.

    Returns:
        Whether there are compiled loops: not without numba, nor with ``NUMBA_DISABLE_JIT=1``.
    """
    return all(loop() is not None for loop in _LOOPS)

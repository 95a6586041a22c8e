"""How this package compiles loops; only modules that :func:`compiled.compiles` guards import it.

A compiled function with addresses for arguments is called from Python in about a microsecond. One
with arrays would first need an array for each tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import carray, cfunc, njit, types

from .compiled import Kernel

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Address = int

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered into vectors. Infinities and NaN keep their meaning.
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
_EVERYTHING = 1 << 40  # elements: what a kernel reads is decided by its caller, not by a bound
_LOGGER = logging.getLogger(__name__)


def loop(function: Function) -> Function:
    """A function that is compiled where a kernel calls it; ``py_func`` of it is Python."""
    compiled: Function = njit(function, **_OPTIONS)
    return compiled


@loop
def memory(address: Address, dtype: Any) -> npt.NDArray[Any]:
    """Memory from an address on, as elements of a dtype."""
    found: npt.NDArray[Any] = carray(address, _EVERYTHING, dtype)
    return found


def kernel(function: Callable[..., int], addresses: int) -> Kernel:
    """Compile a function of this many addresses.

    The result is kept on disk, beside the module or in the user's cache folder, for each kind of
    processor; without a folder to write to, every process compiles.
    """
    signature = types.int64(*[types.voidptr] * addresses)
    try:
        compiled = cfunc(signature, cache=True, **_OPTIONS)(function)
    except RuntimeError as error:  # numba's word for "no folder to write to"
        _LOGGER.info("%s is compiled by each process: %s", function.__name__, error)
        compiled = cfunc(signature, **_OPTIONS)(function)
    entry: Kernel = compiled.ctypes
    return entry

"""The search for kernels that vLLM replaces, past objects that answer any name.

Since 0.31 `vllm.triton_utils.dispatcher` looks through the names of all loaded modules for the
Triton kernels that the CPU platform replaces, and reads `vars()` of every value that has
`__dict__`. The library wrapper of llvmlite, which numba loads, hands out a C function of any name,
`__dict__` too, and the search ends the worker with "'_lib_fn_wrapper' object has no attribute
'get'".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain_vars(value: object) -> Mapping[str, Any]:
    """`vars(value)` where that is a mapping; nothing for a value that makes something up."""
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


def apply() -> bool:
    """Have the search read the attributes of plain objects alone."""
    from vllm.triton_utils import dispatcher

    dispatcher.vars = plain_vars
    return True

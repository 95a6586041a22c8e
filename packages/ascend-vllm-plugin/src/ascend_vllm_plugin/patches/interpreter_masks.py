"""Masks of any integer type in Triton's interpreter.

On a CPU the kernels of vLLM's V2 runner run in Triton's interpreter (see `triton_interpreter`). Its
masked loads and stores take booleans only; compiled kernels take what `&` makes of a boolean and an
integer as well. The kernel that walks along the candidates of a DFlash2 draft makes such a mask
(vllm/v1/worker/gpu/spec_decode/dflash2/speculator.py).
"""

from __future__ import annotations

import os
from typing import Any

MASKED = {"create_masked_load": 1, "create_masked_store": 2}
"""Method of the interpreter's builder -> where its mask is among the arguments."""


def apply() -> bool:
    """Have the interpreter convert its masks; False where kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from triton.runtime.interpreter import InterpreterBuilder

    for name, position in MASKED.items():
        original = getattr(InterpreterBuilder, name)
        if not getattr(original, "takes_any_mask", False):
            setattr(InterpreterBuilder, name, _converting(original, position))
    return True


def _converting(original: Any, position: int) -> Any:
    from triton.runtime.interpreter import TensorHandle

    def masked(builder: Any, *arguments: Any) -> Any:
        values = list(arguments)
        mask = values[position]
        if mask is not None and mask.data.dtype != bool:
            values[position] = TensorHandle(mask.data.astype(bool), mask.dtype)
        return original(builder, *values)

    masked.takes_any_mask = True  # type: ignore[attr-defined]
    return masked

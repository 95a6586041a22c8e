"""Provider ``torch_npu``: runs a call record with the installed torch_npu."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ..operator import NpuCall, Provider


def torch_npu_provider(build: Callable[[Any], NpuCall]) -> Provider:
    """A provider that builds the vendor call with ``build`` and runs it.

    torch_npu is imported at the first call, never before. The function may be an overload, such as
    ``npu_fused_infer_attention_score.out``.
    """

    def execute(args: Any) -> Any:
        call = build(args)
        function = attrgetter(call.function)(importlib.import_module("torch_npu"))
        return function(*call.args, **call.kwargs)

    return Provider("torch_npu", execute, host=False)

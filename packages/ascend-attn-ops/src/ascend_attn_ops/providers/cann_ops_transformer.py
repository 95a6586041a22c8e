"""Provider ``cann_ops_transformer``: runs a call record with the installed operator package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..operator import NpuCall, Provider


def cann_ops_transformer_provider(build: Callable[[Any], NpuCall]) -> Provider:
    """A provider that builds the vendor call with ``build`` and runs it.

    The package is imported at the first call, never before: its import asks the device for its
    core counts. It is built from the ops-transformer sources of CANN; where it is missing, the
    refusal ``provider_available`` says how to install it.
    """

    def execute(args: Any) -> Any:
        call = build(args)
        function = getattr(importlib.import_module("cann_ops_transformer.ops"), call.function)
        return function(*call.args, **call.kwargs)

    return Provider("cann_ops_transformer", execute, host=False)

"""Records the operator calls that a layer makes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import ascend_attn_ops


class Calls(TorchDispatchMode):
    """The calls of this project's operators inside the context: (name, argument record)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ascend_attn":
            name = func._schema.name.split("::")[1]
            self.made.append((name, ascend_attn_ops.operator_named(name).bind(*args, **kwargs)))
        return func(*args, **kwargs)

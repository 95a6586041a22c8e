"""Putting a class of ours in the place of one of vLLM's."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def replace_name(module: ModuleType, ours: object, name: str) -> None:
    """Have a module of vLLM use `ours` where it says `name`; for what has no hook."""
    setattr(module, name, ours)


def replace_layer(stock: Any, ours: type) -> None:
    """Have vLLM build `ours` wherever it builds the layer or custom op `stock`.

    vLLM's own hook for this (`register_oot`) refuses a second registration and renames the class;
    the name stays the stock one here, so that `custom_ops` of the compilation config means both.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    if op_registry_oot.get(stock.__name__) is not ours:
        name = stock.name
        stock.register_oot(ours)
        ours.name = name  # type: ignore[attr-defined]

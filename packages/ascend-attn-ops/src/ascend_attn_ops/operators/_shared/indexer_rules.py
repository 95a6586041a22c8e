"""Predicates that the indexers with torch_npu V1 signatures share."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...arguments import dtype_name
from ...contract import Contract, Predicate, RuleContext
from .sequence_rules import empty_tensors, shape_of
from .sequences import Sequences


class _Indexer(Protocol):
    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor

    @property
    def sequences(self) -> Sequences: ...


def not_empty(a: _Indexer, ctx: RuleContext) -> str | None:
    """Query and key have elements."""
    return empty_tensors((("query", a.query), ("key", a.key)))


def key_dtype(a: _Indexer, ctx: RuleContext) -> str | None:
    """Key has the dtype of query."""
    if a.key.dtype == a.query.dtype:
        return None
    return f"{dtype_name(a.key.dtype)} for a query of {dtype_name(a.query.dtype)}"


def key_size(a: _Indexer, ctx: RuleContext) -> str | None:
    """Key has the head size of query."""
    if a.key.shape[-1] == a.query.shape[-1]:
        return None
    return f"{a.key.shape[-1]} for a query of {a.query.shape[-1]}"


def head_size(a: _Indexer, ctx: RuleContext) -> str | None:
    """The head size that the kernels are built for."""
    size = a.query.shape[-1]
    return None if size == ctx.limits["head_size"] else str(size)


def heads(a: _Indexer, ctx: RuleContext) -> str | None:
    """At most so many heads on A2 and A3."""
    count = a.query.shape[-2]
    return None if 1 <= count <= ctx.limits["max_heads"] else str(count)


def heads_a5(a: _Indexer, ctx: RuleContext) -> str | None:
    """Listed head counts on Ascend950."""
    count = a.query.shape[-2]
    return None if count in ctx.limits["heads_a5"] else str(count)


def weights_shape(a: _Indexer, ctx: RuleContext) -> str | None:
    """One weight per row and head."""
    if a.weights.shape == a.query.shape[:-1]:
        return None
    return f"{shape_of(a.weights)} for query {shape_of(a.query)}"


_SHARED: tuple[Predicate, ...] = (
    not_empty, key_dtype, key_size, head_size, heads, heads_a5, weights_shape,
)  # fmt: skip


def add_indexer_rules(contract: Contract[Any]) -> None:
    """Give the shared rules of ``contract.toml`` their predicates, by name."""
    for predicate in _SHARED:
        contract.rule(predicate.__name__)(predicate)

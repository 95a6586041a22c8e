"""Predicates about the selected keys that the two sparse flash attentions share."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...arguments import dtype_name
from ...contract import Contract, Predicate, RuleContext
from .sequence_rules import shape_of
from .sequences import Sequences


class _Sparse(Protocol):
    sparse_indices: torch.Tensor
    sparse_block_size: int
    attention_mode: int

    @property
    def sequences(self) -> Sequences: ...


def indices_rank(a: _Sparse, ctx: RuleContext) -> str | None:
    """Indices have the rank of the query's layout."""
    expected = 3 if a.sequences.layout_query == "TND" else 4
    if a.sparse_indices.dim() == expected:
        return None
    return f"rank {a.sparse_indices.dim()} {shape_of(a.sparse_indices)}"


def indices_dtype(a: _Sparse, ctx: RuleContext) -> str | None:
    """Indices are int32."""
    dtype = a.sparse_indices.dtype
    return None if dtype == torch.int32 else dtype_name(dtype)


def indices_shape(a: _Sparse, ctx: RuleContext) -> str | None:
    """One index row per query row."""
    query, indices = a.sequences.query.shape, a.sparse_indices.shape
    if indices[:-2] == query[:-2] and indices[-2] == 1:
        return None
    return f"{list(indices)} for query {list(query)}"


def attention_mode(a: _Sparse, ctx: RuleContext) -> str | None:
    """Only the absorbed MLA form exists."""
    mode = a.attention_mode
    return None if mode == ctx.limits["attention_mode"] else str(mode)


def sparse_block_size(a: _Sparse, ctx: RuleContext) -> str | None:
    """A power of two within the operator's limit."""
    size = a.sparse_block_size
    legal = 1 <= size <= ctx.limits["sparse_block_max"] and size & (size - 1) == 0
    return None if legal else str(size)


def sparse_block_size_one(a: _Sparse, ctx: RuleContext) -> str | None:
    """Ascend950 selects single tokens."""
    return None if a.sparse_block_size == 1 else str(a.sparse_block_size)


def sparse_block_divides(a: _Sparse, ctx: RuleContext) -> str | None:
    """Selected blocks do not cross cache blocks."""
    s = a.sequences
    if not s.paged or s.block_size % a.sparse_block_size == 0:
        return None
    return f"{a.sparse_block_size} in blocks of {s.block_size}"


def indices_values(a: _Sparse, ctx: RuleContext) -> str | None:
    """Entries are -1 or blocks of the request's keys, and nothing follows a -1."""
    s = a.sequences
    rows, keys = s.query_rows(), s.key_rows()
    indices = a.sparse_indices.reshape(s.tokens, -1).long()
    blocks = -(-keys.lengths[rows.request] // a.sparse_block_size)
    outside = (indices < -1) | (indices >= blocks[:, None])
    after = (indices == -1).cumsum(-1).gt(0) & (indices != -1)
    for wrong, text in ((outside, "of {} blocks"), (after, "after a -1, which ends the row")):
        places = (wrong & rows.real[:, None]).nonzero()
        if places.numel():
            row, column = places[0].tolist()
            return f"row {row}, entry {column} = {int(indices[row, column])} " + text.format(
                int(blocks[row])
            )
    return None


_SHARED: tuple[Predicate, ...] = (
    indices_rank, indices_dtype, indices_shape, attention_mode, sparse_block_size,
    sparse_block_size_one, sparse_block_divides, indices_values,
)  # fmt: skip


def add_selection_rules(contract: Contract[Any]) -> None:
    """Give the shared rules of ``contract.toml`` their predicates, by name."""
    for predicate in _SHARED:
        contract.rule(predicate.__name__)(predicate)

"""Predicates about layouts, lengths and block tables that the sparse attention family shares.

Every record of the family has a property ``sequences``; ``contract.toml`` of each operator says
the parameter names, limits and sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from ...arguments import dtype_name
from ...contract import Contract, Predicate, RuleContext
from .sequences import PAGED_LAYOUTS, Sequences

UNLIMITED = 2**63 - 1


class _HasSequences(Protocol):
    sparse_mode: int
    pre_tokens: int
    next_tokens: int

    @property
    def sequences(self) -> Sequences: ...


def shape_of(tensor: torch.Tensor) -> str:
    """``[4, 16, 512]``."""
    return str(list(tensor.shape))


def layout_query(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Name of the query layout."""
    name = a.sequences.layout_query
    return None if name in ctx.limits["query_layouts"] else repr(name)


def layout_kv(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Name of the key layout."""
    name = a.sequences.layout_kv
    return None if name in ctx.limits["kv_layouts"] else repr(name)


def query_rank(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Rank of the query in its layout."""
    return _rank(a.sequences.layout_query, a.sequences.query)


def key_rank(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Rank of the key in its layout."""
    return _rank(a.sequences.layout_kv, a.sequences.key)


def _rank(layout: str, tensor: torch.Tensor) -> str | None:
    expected = 3 if layout == "TND" else 4
    if tensor.dim() == expected:
        return None
    return f"rank {tensor.dim()} {shape_of(tensor)} for {layout}"


def sparse_mode(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Mask mode."""
    return None if a.sparse_mode in ctx.limits["sparse_modes"] else str(a.sparse_mode)


def tokens(a: _HasSequences, ctx: RuleContext) -> str | None:
    """No band: both bounds are the largest int64."""
    bounds = {"pre_tokens": a.pre_tokens, "next_tokens": a.next_tokens}
    return ", ".join(f"{n} {v}" for n, v in bounds.items() if v != UNLIMITED) or None


def layouts(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Unpaged keys have the layout of the query."""
    s = a.sequences
    if s.paged or s.layout_kv == s.layout_query:
        return None
    return f"query {s.layout_query}, keys {s.layout_kv}"


def block_table_given(a: _HasSequences, ctx: RuleContext) -> str | None:
    """A block table exactly for paged keys."""
    s = a.sequences
    if s.paged == (s.block_table is not None):
        return None
    return f"{'nothing' if s.block_table is None else shape_of(s.block_table)} for {s.layout_kv}"


def query_lengths_given(a: _HasSequences, ctx: RuleContext) -> str | None:
    """TND needs lengths: they define the batch."""
    s = a.sequences
    if s.layout_query != "TND" or (s.query_lengths is not None and s.query_lengths.numel() > 0):
        return None
    return "nothing" if s.query_lengths is None else shape_of(s.query_lengths)


def kv_lengths_given(a: _HasSequences, ctx: RuleContext) -> str | None:
    """TND and paged keys need lengths."""
    s = a.sequences
    return None if s.layout_kv == "BSND" or s.kv_lengths is not None else "nothing"


def kv_heads(a: _HasSequences, ctx: RuleContext) -> str | None:
    """One key head."""
    heads = a.sequences.key.shape[-2]
    return None if heads == 1 else str(heads)


def block_size(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Tokens per block, as the cache's shape says."""
    s = a.sequences
    if not s.paged:
        return None
    legal = 0 < s.block_size <= ctx.limits["block_max"]
    return None if legal and s.block_size % ctx.limits["block_multiple"] == 0 else str(s.block_size)


def block_table(a: _HasSequences, ctx: RuleContext) -> str | None:
    """dtype and shape of the block table."""
    s = a.sequences
    if s.block_table is None:
        return None
    shape = s.block_table.shape
    if len(shape) != 2 or shape[0] != s.batch or shape[1] == 0:
        return f"{shape_of(s.block_table)} for {s.batch} requests"
    return None if s.block_table.dtype == torch.int32 else dtype_name(s.block_table.dtype)


def query_lengths(a: _HasSequences, ctx: RuleContext) -> str | None:
    """dtype and count of the query lengths."""
    return _lengths(a.sequences.query_lengths, a.sequences.batch)


def kv_lengths(a: _HasSequences, ctx: RuleContext) -> str | None:
    """dtype and count of the key lengths."""
    return _lengths(a.sequences.kv_lengths, a.sequences.batch)


def _lengths(lengths: torch.Tensor | None, batch: int) -> str | None:
    if lengths is None or (lengths.dtype == torch.int32 and lengths.shape == (batch,)):
        return None
    return f"{dtype_name(lengths.dtype)}{shape_of(lengths)} for {batch} requests"


def key_batch(a: _HasSequences, ctx: RuleContext) -> str | None:
    """BSND keys: one entry per request."""
    s = a.sequences
    if s.layout_kv != "BSND" or s.key.shape[0] == s.batch:
        return None
    return f"{shape_of(s.key)} for {s.batch} requests"


def query_lengths_values(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Query lengths lie inside the query."""
    s = a.sequences
    end = s.query.shape[0] if s.layout_query == "TND" else s.query.shape[1]
    return bad_length(s.query_lengths, end, cumulative=s.layout_query == "TND")


def kv_lengths_values(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Key lengths lie inside the keys, for paged ones inside the block table row."""
    s = a.sequences
    if s.paged:
        assert s.block_table is not None  # noqa: S101 - an earlier rule
        end = s.block_table.shape[1] * s.block_size
    else:
        end = s.key.shape[0] if s.layout_kv == "TND" else s.key.shape[1]
    return bad_length(s.kv_lengths, end, cumulative=s.layout_kv == "TND")


def bad_length(lengths: torch.Tensor | None, end: int, *, cumulative: bool) -> str | None:
    """The first length that is negative, beyond ``end`` or, if cumulative, decreasing."""
    last = 0
    for index, length in enumerate([] if lengths is None else lengths.tolist()):
        if not 0 <= length <= end:
            return f"value {length} at {index}, room {end}"
        if cumulative and length < last:
            return f"value {length} after {last} at {index}"
        last = length
    return None


def block_ids(a: _HasSequences, ctx: RuleContext) -> str | None:
    """Blocks that the lengths read exist."""
    s = a.sequences
    if s.block_table is None or s.kv_lengths is None:
        return None
    return bad_block_id(s.block_table, s.kv_lengths, s.key.shape[0], s.block_size)


def bad_block_id(
    table: torch.Tensor, kv_lengths: torch.Tensor, blocks: int, block_size: int
) -> str | None:
    """The first block id that the lengths read and that is no block of the cache."""
    used = torch.arange(table.shape[1]) * block_size < kv_lengths.cpu()[:, None]
    wrong = used & ((table < 0) | (table >= blocks)).cpu()
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    return f"block_table[{row}, {column}] = {int(table[row, column])} of {blocks} blocks"


_SHARED: tuple[Predicate, ...] = (
    layout_query, layout_kv, query_rank, key_rank, sparse_mode, tokens, layouts,
    block_table_given, query_lengths_given, kv_lengths_given, kv_heads, block_size, block_table,
    query_lengths, kv_lengths, key_batch, query_lengths_values, kv_lengths_values, block_ids,
)  # fmt: skip


def add_sequence_rules(contract: Contract[Any]) -> None:
    """Give the shared rules of ``contract.toml`` their predicates, by name.

    Raises:
        ContractDataError: The operator's file lacks one of the rules.
    """
    for predicate in _SHARED:
        contract.rule(predicate.__name__)(predicate)


def strided(
    tensors: Mapping[str, torch.Tensor | None], layout: str, *, free_axis: bool
) -> str | None:
    """Paged caches whose strides the product does not take.

    Args:
        tensors: Caches by name.
        layout: Key layout; other layouts are made contiguous by the vendor's wrapper.
        free_axis: Whether blocks may lie apart (axis 0 strided).
    """
    if layout not in PAGED_LAYOUTS:
        return None
    found = [
        f"{name} strides {list(tensor.stride())} for {shape_of(tensor)}"
        for name, tensor in tensors.items()
        if tensor is not None and not _dense(tensor, free_axis=free_axis)
    ]
    return ", ".join(found) or None


def _dense(tensor: torch.Tensor, *, free_axis: bool) -> bool:
    return (tensor[0] if free_axis and tensor.shape[:1] > (0,) else tensor).is_contiguous()


def empty_tensors(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    """Tensors without elements."""
    found = [f"{n} {shape_of(t)}" for n, t in tensors if t is not None and t.numel() == 0]
    return ", ".join(found) or None

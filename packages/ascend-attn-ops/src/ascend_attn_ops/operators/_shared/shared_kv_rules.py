"""Predicates that sparse_flash_mla and sparse_flash_mla_metadata share."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, Predicate, RuleContext
from .findings import given

_SIDES = {"cu_seqlens_q": "layout_q", "cu_seqlens_ori_kv": "layout_kv"}
_LENGTHS = (
    "cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv",
    "seqused_q", "seqused_ori_kv", "seqused_cmp_kv", "cmp_residual_kv",
)  # fmt: skip


class _SharedKv(Protocol):
    cmp_residual_kv: torch.Tensor | None
    cmp_topk_length: torch.Tensor | None
    cmp_ratio: int
    ori_mask_mode: int
    cmp_mask_mode: int
    ori_win_left: int
    ori_win_right: int
    layout_q: str
    layout_kv: str

    @property
    def has_compressed(self) -> bool: ...

    @property
    def has_indices(self) -> bool: ...


def layout_q(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Name of the query layout."""
    return None if a.layout_q in ctx.limits["query_layouts"] else repr(a.layout_q)


def layout_kv(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Name of the key layout."""
    return None if a.layout_kv in ctx.limits["kv_layouts"] else repr(a.layout_kv)


def layouts(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Unpaged keys have the layout of the query."""
    if a.layout_kv in (a.layout_q, "PA_BBND"):
        return None
    return f"query {a.layout_q}, keys {a.layout_kv}"


def ori_mask_mode(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Mask of the original keys."""
    legal = a.ori_mask_mode in ctx.limits["ori_mask_modes"]
    return None if legal else str(a.ori_mask_mode)


def cmp_mask_mode(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Mask of the compressed keys."""
    legal = a.cmp_mask_mode in ctx.limits["cmp_mask_modes"]
    return None if legal else str(a.cmp_mask_mode)


def cmp_ratio(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Tokens per compressed key."""
    legal = 1 <= a.cmp_ratio <= ctx.limits["cmp_ratio_max"]
    return None if legal else str(a.cmp_ratio)


def windows(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Sides of the window."""
    sides = [a.ori_win_left, a.ori_win_right]
    return None if min(sides) >= -1 else str(sides)


def windows_a2_a3(a: _SharedKv, ctx: RuleContext) -> str | None:
    """The one window of A2 and A3."""
    sides = (a.ori_win_left, a.ori_win_right)
    legal = a.ori_mask_mode != 4 or sides == ctx.limits["window_a2_a3"]
    return None if legal else str(list(sides))


def cmp_ratio_a2_a3(a: _SharedKv, ctx: RuleContext) -> str | None:
    """The ratio of each scenario on A2 and A3."""
    key = "sparse_ratio_a2_a3" if a.has_indices else "dense_ratio_a2_a3"
    legal = not a.has_compressed or a.cmp_ratio == ctx.limits[key]
    return None if legal else f"{a.cmp_ratio} {'with' if a.has_indices else 'without'} indices"


def residual_given(a: _SharedKv, ctx: RuleContext) -> str | None:
    """The causal mask of compressed keys is measured in tokens."""
    needed = a.has_compressed and a.cmp_mask_mode == 3 and a.cmp_ratio != 1
    return "nothing" if needed and a.cmp_residual_kv is None else None


def topk_length(a: _SharedKv, ctx: RuleContext) -> str | None:
    """Lengths of index rows, only without a mask."""
    if a.cmp_topk_length is None or (a.cmp_mask_mode == 0 and a.has_indices):
        return None
    return f"lengths with cmp_mask_mode {a.cmp_mask_mode}, indices: {a.has_indices}"


def wrong_prefix_sums_given(a: Any) -> Finding | None:
    """Prefix sums where the layout is not TND, or none where it is."""
    wanted = {name: getattr(a, layout) == "TND" for name, layout in _SIDES.items()}
    wanted["cu_seqlens_cmp_kv"] = wanted["cu_seqlens_ori_kv"] and a.has_compressed
    for name, expected in wanted.items():
        if expected != (getattr(a, name) is not None):
            found = "nothing" if expected else "prefix sums"
            layout = getattr(a, _SIDES.get(name, "layout_kv"))
            return Finding(f"{found} with {layout}", parameter=name)
    return None


def wrong_counts(a: Any, batch: int) -> Finding | None:
    """The first length tensor that is not an int32 vector for ``batch`` requests."""
    for name, tensor in given(a, _LENGTHS).items():
        count = batch + name.startswith("cu_")
        if tensor.dtype != torch.int32 or tensor.shape != (count,):
            found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)} for {batch} requests"
            return Finding(found, parameter=name)
    return None


_SHARED: tuple[Predicate, ...] = (
    layout_q, layout_kv, layouts, ori_mask_mode, cmp_mask_mode, cmp_ratio, windows,
    windows_a2_a3, cmp_ratio_a2_a3, residual_given, topk_length,
)  # fmt: skip


def add_shared_kv_rules(contract: Contract[Any]) -> None:
    """Give the shared rules of ``contract.toml`` their predicates, by name."""
    for predicate in _SHARED:
        contract.rule(predicate.__name__)(predicate)

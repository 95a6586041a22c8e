"""A plan as a table for people and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..dsa import DsaCompression
from .groups import DsaCacheGroup

if TYPE_CHECKING:
    from .plan import DsaAttnKvPlan

CONTEXTS = (4096, 32768, 131072, 1048576)
"""Lengths at which a plan is compared with other architectures."""

_COLUMNS = (
    "cache",
    "layers",
    "tokens/row",
    "rows/block",
    "tokens/block",
    "KiB/block",
    "B/token",
    "blocks/request",
)


def plan_data(plan: DsaAttnKvPlan, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """The plan as plain data; bytes are those of all layers unless they say otherwise."""
    options = plan.options
    return {
        "layers": [
            {
                "layer": number,
                "kind": kind_of(compression),
                "compress_ratio": 1 if compression is None else compression.ratio,
                "top_k": None if compression is None else compression.top_k,
                "caches": [group.name for group in plan.groups_of(number)],
            }
            for number, compression in enumerate(plan.model.layers)
        ],
        "groups": [_group_data(plan, group) for group in plan.groups],
        "window": plan.model.window,
        "dtype": str(plan.model.dtype).removeprefix("torch."),
        "num_spec_tokens": options.num_spec_tokens,
        "max_step_tokens": options.max_step_tokens,
        "bytes_per_token": float(plan.bytes_per_token),
        "requests": [_request_data(plan, length) for length in contexts],
    }


def _group_data(plan: DsaAttnKvPlan, group: DsaCacheGroup) -> dict[str, Any]:
    steady, peak = _step_blocks(plan, group)
    return {
        "cache": group.cache,
        "name": group.name,
        "layers": list(group.layers),
        "tokens_per_row": group.tokens_per_row,
        "rows_per_block": group.rows_per_block,
        "tokens_per_block": group.tokens_per_block,
        "dtype": str(group.dtype).removeprefix("torch."),
        "row_bytes_per_layer": group.row_bytes,
        "block_bytes_per_layer": group.block_bytes,
        "null_blocks": group.null_blocks,
        "decode_blocks_per_request": steady,
        "peak_blocks_per_request": peak,
    }


def _step_blocks(plan: DsaAttnKvPlan, group: DsaCacheGroup) -> tuple[int, int] | tuple[None, None]:
    """Most blocks of any request while it decodes, and in its longest step; None where it grows."""
    if group.grows:
        return None, None
    decode, peak = plan.options.num_spec_tokens + 1, plan.options.max_step_tokens
    endless = 2**62
    return group.max_blocks(endless, decode), group.max_blocks(endless, peak)


def _request_data(plan: DsaAttnKvPlan, length: int) -> dict[str, int]:
    other = plan.compare(length)
    return {
        "tokens": length,
        "bytes": other.dsa,
        "peak_bytes": plan.request_bytes(length, plan.options.max_step_tokens),
        "uncompressed_bytes": other.uncompressed,
        "mla_bytes": other.mla,
        "mha_bytes": other.mha,
    }


def plan_text(plan: DsaAttnKvPlan, contexts: Sequence[int] = CONTEXTS) -> str:
    """The table that ``kv-plan`` prints."""
    return "\n".join(
        [*_head(plan), "", *_groups(plan), "", *_requests(plan, contexts), "", *_notes(plan)]
    )


def kind_of(compression: DsaCompression | None) -> str:
    """``"compressed by 4, top 512"``."""
    if compression is None:
        return "sliding window"
    chosen = "" if compression.top_k is None else f", top {compression.top_k}"
    return f"compressed by {compression.ratio}{chosen}"


def _head(plan: DsaAttnKvPlan) -> Iterator[str]:
    model, options = plan.model, plan.options
    dtype = str(model.dtype).removeprefix("torch.")
    yield (
        f"{len(model.layers)} layers, keys of {model.key_size} {dtype}, window {model.window}, "
        f"{options.num_spec_tokens} drafts, steps of up to {options.max_step_tokens} tokens"
    )
    for kind, count in Counter(map(kind_of, model.layers)).items():
        yield f"  {count:>4}  {kind}"


def _groups(plan: DsaAttnKvPlan) -> Iterator[str]:
    rows: list[Sequence[str]] = [_COLUMNS]
    for group in plan.groups:
        steady, peak = _step_blocks(plan, group)
        token = group.row_bytes * len(group.layers) / group.tokens_per_row
        rows.append(
            (
                group.name,
                str(len(group.layers)),
                str(group.tokens_per_row),
                str(group.rows_per_block),
                str(group.tokens_per_block),
                f"{group.block_bytes / 1024:g}",
                f"{token:.1f}" if group.grows else "-",
                "all" if steady is None else f"{steady}, at most {peak}",
            )
        )
    return _aligned(rows)


def _requests(plan: DsaAttnKvPlan, contexts: Iterable[int]) -> Iterator[str]:
    rows: list[Sequence[str]] = [
        ("tokens", "MiB/request", "peak", "uncompressed", "MLA", "MHA", "MLA/plan", "MHA/plan")
    ]
    for length in contexts:
        entry = _request_data(plan, length)
        sizes = ("bytes", "peak_bytes", "uncompressed_bytes", "mla_bytes", "mha_bytes")
        ratios = (entry[name] / entry["bytes"] for name in ("mla_bytes", "mha_bytes"))
        rows.append(
            (
                str(length),
                *(f"{entry[name] / 2**20:.1f}" for name in sizes),
                *(f"{ratio:.1f}" for ratio in ratios),
            )
        )
    return _aligned(rows)


def _notes(plan: DsaAttnKvPlan) -> Iterator[str]:
    yield f"A long request grows by {float(plan.bytes_per_token):,.1f} bytes per token."
    yield (
        "KiB/block and blocks/request are those of one layer, the latter while decoding and in the "
        "longest step; bytes are of all layers."
    )
    yield "Every rank of a tensor-parallel group keeps all of it: there is one key head."


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns right-aligned, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()

"""The formula, request by request, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

import torch

from .arguments import SparseFlashMlaArguments as Args
from .lengths import KeySide, cmp_side, ori_side, query_spans

_ROWS = 64  # query rows that are computed at once

Outputs = tuple[torch.Tensor, torch.Tensor]


def run_reference(a: Args) -> Outputs:
    """attention_out and softmax_lse; see the argument record."""
    heads, size = a.q.shape[-2:]
    query = a.q.reshape(-1, heads, size)
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], float("-inf"))
    ori = ori_side(a)
    cmp = cmp_side(a) if a.has_compressed else None
    for request, (start, length) in enumerate(query_spans(a)):
        for first in range(0, length, _ROWS):
            rows = torch.arange(first, min(first + _ROWS, length))
            keys, bias = _visible(a, request, rows, length, ori, cmp)
            chosen = start + rows
            out[chosen], lse[chosen] = _attend(a, query[chosen], keys, bias)
    if not a.return_softmax_lse:
        return out.view(a.q.shape), torch.zeros(())
    return out.view(a.q.shape), lse.view(a.q.shape[:-1]).unsqueeze(-3)


def _visible(
    a: Args, request: int, rows: torch.Tensor, length: int, ori: KeySide, cmp: KeySide | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (L, D) that some row sees, and bias (R, L): -inf hidden, else ln of how often seen."""
    first, end = ori_window(a, rows, length, ori.length(request))
    low, high = int(first.min()), int(end.max())
    high = max(low, high)
    position = torch.arange(low, high)
    seen = (position >= first[:, None]) & (position < end[:, None])
    keys, bias = [ori.read(request, low, high)], [seen.double().log()]
    if cmp is not None:
        count = cmp.length(request)
        keys.append(cmp.read(request, 0, count))
        bias.append(_times_seen(a, request, rows, length, count).log())
    return torch.cat(keys), torch.cat(bias, -1)


def ori_window(
    a: Args, rows: torch.Tensor, length: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(R,) first visible original key and one after the last of each row."""
    position = keys - length + rows
    first, end = torch.zeros_like(rows), torch.full_like(rows, keys)
    if a.ori_mask_mode == 3:
        end = position + 1
    if a.ori_mask_mode == 4:
        first = position - a.ori_win_left if a.ori_win_left >= 0 else first
        end = position + a.ori_win_right + 1 if a.ori_win_right >= 0 else end
    return first.clamp(0, keys), end.clamp(0, keys)


def cmp_visible(a: Args, request: int, rows: torch.Tensor, length: int, keys: int) -> torch.Tensor:
    """(R,) number of leading compressed keys that each row may see."""
    if a.cmp_mask_mode == 0:
        return torch.full_like(rows, keys)
    residual = 0 if a.cmp_residual_kv is None else int(a.cmp_residual_kv[request])
    tokens = keys * a.cmp_ratio + residual - length + rows + 1
    return torch.div(tokens, a.cmp_ratio, rounding_mode="floor").clamp(0, keys)


def _times_seen(a: Args, request: int, rows: torch.Tensor, length: int, keys: int) -> torch.Tensor:
    """(R, Lcmp) float64 how often each row counts each compressed key."""
    visible = cmp_visible(a, request, rows, length, keys)
    if a.cmp_sparse_indices is None:
        return (torch.arange(keys) < visible[:, None]).double()
    start = query_spans(a)[request][0]
    entries = a.cmp_sparse_indices.flatten(0, -2)[start + rows].long()
    counted = (entries >= 0) & (entries < visible[:, None])
    if a.cmp_topk_length is not None:
        read = a.cmp_topk_length.flatten()[start + rows]
        counted &= torch.arange(entries.shape[-1]) < read[:, None]
    times = torch.zeros(len(rows), keys + 1, dtype=torch.float64)
    times.scatter_add_(1, entries.where(counted, keys), counted.double())
    return times[:, :keys]


def _attend(a: Args, query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor) -> Outputs:
    """out (R, N, D) and lse (R, N) of rows (R, N, D)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = keys.to(wide)
    scores = a.softmax_scale * query.to(wide) @ keys.T + bias.to(wide)[:, None]
    sink = scores.new_full(query.shape[1:2], float("-inf")) if a.sinks is None else a.sinks.to(wide)
    every = torch.cat([scores, sink[:, None].expand(*scores.shape[:2], 1)], -1)
    nothing = every.amax(-1, keepdim=True).isneginf()  # neither a key nor a sink
    weights = every.softmax(-1).masked_fill(nothing, 0.0)
    lse = torch.cat([scores, torch.full_like(every[..., :1], float("-inf"))], -1).logsumexp(-1)
    return (weights[..., :-1] @ keys).to(query.dtype), lse.float()

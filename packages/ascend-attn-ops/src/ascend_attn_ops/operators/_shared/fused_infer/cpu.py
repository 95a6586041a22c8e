"""Fast host provider: runs of equal length go together through torch's CPU attention kernels.

Unmasked and causal attention goes through torch's flash kernel, which reports the lse, so that
parts of the keys can be merged; everything else goes through tiles with a running softmax. Keys are
gathered tile by tile, so that no score tensor larger than a tile exists.
"""

from __future__ import annotations

import torch

from .call import Call
from .flash import attend_flash, requests_together, takes_flash
from .pieces import Bucket, buckets
from .problem import Problem, Span, problem
from .tiles import attend_tiles

_SCORES = 1 << 24  # scores of one tile: 64 MiB in float32
_WHOLE = 1 << 62


def run_cpu(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all requests; see the argument record."""
    p = problem(call)
    out = torch.zeros(len(p.query), call.heads, p.value_size, dtype=p.query.dtype)
    lse = torch.full((len(p.query), call.heads), float("inf"), dtype=torch.float32)
    flash = [span for span in p.spans if takes_flash(p, span)]
    together = requests_together(p)
    for bucket in buckets(flash, most_rows=_WHOLE, most=_WHOLE, most_runs=together):
        _store(p, bucket, attend_flash(p, bucket), out, lse)
    rest = [span for span in p.spans if not takes_flash(p, span)]
    for bucket in _tiled(p, rest):
        _store(p, bucket, attend_tiles(p, bucket), out, lse)
    return p.outputs(out, lse)


def _tiled(p: Problem, spans: list[Span]) -> list[Bucket]:
    rows = max(_SCORES // (p.call.heads * p.values.unit), 1)
    return buckets(spans, most_rows=min(rows, 1024), most=rows, most_runs=_WHOLE)


def _store(
    p: Problem,
    bucket: Bucket,
    result: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write outputs [R, N, n, VD] and lse [R, N, n] (-inf: no keys) to their rows."""
    part, part_lse = result
    if p.call.sink is not None:  # the sink only enlarges the denominator
        sink = p.call.sink.to(part_lse.dtype)[:, None]
        part = part * torch.sigmoid(part_lse - sink)[..., None]
    rows = bucket.rows.reshape(-1)
    out[rows] = part.transpose(1, 2).flatten(0, 1).to(out.dtype)
    if p.call.lse:
        marked = part_lse.masked_fill(part_lse.isneginf(), float("inf"))
        lse[rows] = marked.transpose(1, 2).flatten(0, 1).float()

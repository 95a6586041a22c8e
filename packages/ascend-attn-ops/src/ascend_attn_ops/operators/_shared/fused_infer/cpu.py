"""Fast host provider: runs of equal length go together through torch's CPU attention kernels.

Decode rows over large blocks read them where they lie. Other unmasked and causal attention goes
through torch's flash kernel, which reports the lse, so that parts of the keys can be merged;
everything else goes through tiles with a running softmax. There keys are gathered tile by tile, so
that no score tensor larger than a tile exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from .call import Call
from .decode import DecodePlan, joined, reads_in_place
from .flash import attend_flash, requests_together, takes_flash
from .outputs import Results
from .pieces import Bucket, buckets
from .problem import Problem, Span, block_caches, problem, spans_of, with_rope
from .tiles import attend_tiles

_SCORES = 1 << 24  # scores of one tile: 64 MiB in float32
_WHOLE = 1 << 62


def run_cpu(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all requests; see the argument record."""
    ready = prepare_cpu(call)
    if ready is not None:
        return ready(call.query, call.key, call.value, call.query_rope, call.key_rope)
    p = problem(call)
    results = Results.of(call, len(p.query), p.query.dtype)
    decoded, others = _split(call, p.spans)
    if decoded:
        _decode(results, decoded, p.query)
    flash = [span for span in others if takes_flash(p, span)]
    together = requests_together(p)
    for bucket in buckets(flash, most_rows=_WHOLE, most=_WHOLE, most_runs=together):
        _put(results, bucket, attend_flash(p, bucket))
    rest = [span for span in others if not takes_flash(p, span)]
    for bucket in _tiled(p, rest):
        _put(results, bucket, attend_tiles(p, bucket))
    return p.outputs(results.out, results.lse)


def prepare_cpu(call: Call) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """What runs the call for tensors of the same shapes and strides, or None.

    Only steps in which every request is decoded in place are worth it: their lengths and block
    table decide which blocks are multiplied, and that is then worked out once for all layers.
    """
    decoded, others = _split(call, spans_of(call)[0])
    if not decoded or others or call.layout != "TND" or call.sink is not None:
        return None
    return _DecodeStep(call, decoded).run


@attrs.frozen(eq=False)
class _DecodeStep:
    """A step in which every request with keys is decoded in place.

    Attributes:
        call: Of one of its layers; only shapes, strides, lengths and scalars of it are used.
        spans: Its requests.
    """

    call: Call
    spans: list[Span]
    _plans: dict[int, DecodePlan] = attrs.field(factory=dict, init=False)
    _no_lse: torch.Tensor = attrs.field(factory=lambda: torch.empty(0), init=False)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_rope: torch.Tensor | None = None,
        key_rope: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and lse of the operator for the tensors of a layer."""
        call = self.call
        query = with_rope(query, query_rope, call)
        *parts, values = block_caches(call, key, key_rope, value)
        keys = joined(parts)
        plan = self._plans.get(len(keys))
        if plan is None:
            plan = self._plans[len(keys)] = DecodePlan.of(call, self.spans, keys, values)
        shape = (*query.shape[:2], plan.value_size)
        filled = len(plan.rows) == len(query)
        out = query.new_empty(shape) if filled else query.new_zeros(shape)
        if not call.lse:
            plan.attend(query, keys, values, out, None)
            return out, self._no_lse
        lse = torch.full(query.shape[:2], float("inf"), dtype=torch.float32)
        plan.attend(query, keys, values, out, lse)
        return out, lse[..., None]


def _split(call: Call, spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Requests that are decoded in place, and the others that have rows and keys."""
    computed = [span for span in spans if span.q_len and span.kv_len]
    if not reads_in_place(call):
        return [], computed
    decoded = [span for span in computed if span.q_len == 1]
    return decoded, [span for span in computed if span.q_len > 1]


def _decode(results: Results, spans: list[Span], query: torch.Tensor) -> None:
    """Requests to decode beside others."""
    call = results.call
    *keys, values = block_caches(call, call.first_key, call.key_rope, call.first_value)
    plan = DecodePlan.of(call, spans, keys, values)
    out, lse = torch.empty_like(results.out), results.lse.to(query.dtype)
    plan.attend(query, keys, values, out, lse)
    rows = torch.tensor([row.number for row in plan.rows])
    results.put(rows, out[rows], lse[rows])


def _tiled(p: Problem, spans: list[Span]) -> list[Bucket]:
    rows = max(_SCORES // (p.call.heads * p.values.unit), 1)
    return buckets(spans, most_rows=min(rows, 1024), most=rows, most_runs=_WHOLE)


def _put(results: Results, bucket: Bucket, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write outputs [R, N, n, VD] and lse [R, N, n] (-inf: no keys) of a bucket's rows."""
    part, lse = (tensor.transpose(1, 2).flatten(0, 1) for tensor in result)
    results.put(bucket.rows.reshape(-1), part, lse)

"""Fast host provider: runs of equal length go together through torch's CPU attention kernels.

Decode rows read blocks where they lie: by a compiled loop, or large ones by torch's products.
Other unmasked and causal attention goes through torch's flash kernel, which reports the lse, so
that parts of the keys can be merged; everything else goes through tiles with a running softmax.
There keys are gathered tile by tile, so that no score tensor larger than a tile exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from .call import Call
from .compiled_decode import CompiledPlan, attends
from .decode import LARGE_BLOCK, DecodePlan, joined, legible_caches
from .flash import attend_flash, requests_together, takes_flash
from .outputs import Results
from .pieces import Bucket, buckets
from .problem import Problem, Span, block_caches, problem, spans_of, with_rope
from .tiles import attend_tiles

_SCORES = 1 << 24  # scores of one tile: 64 MiB in float32
_WHOLE = 1 << 62
_NO_LSE = torch.empty(0)


def run_cpu(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all requests; see the argument record."""
    ready = prepare_cpu(call)
    if ready is not None:
        return ready(call.query, call.key, call.value, call.query_rope, call.key_rope)
    p = problem(call)
    results = Results.of(call, len(p.query), p.query.dtype)
    decoded, others = _split(call, p.spans)
    if decoded is not None:
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
    if decoded is None or others or call.layout != "TND" or call.sink is not None:
        return None
    if not decoded.compiled:
        return _DecodeStep(call, decoded.spans).run
    own = call.query, call.query_rope
    plan = CompiledPlan.of(call, decoded.spans, own, decoded.caches, lse=call.lse)
    return _CompiledStep(call.lse, plan)


@attrs.frozen(eq=False)
class _CompiledStep:
    """A step in which every request with keys is decoded by the compiled loop.

    Attributes:
        lse: Whether the lse is wanted.
        plan: For all layers.
    """

    lse: bool
    plan: CompiledPlan

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_rope: torch.Tensor | None = None,
        key_rope: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and lse of the operator for the tensors of a layer."""
        plan = self.plan
        out, lse = _step_outputs(query, plan.value_size, len(plan.requests), lse=self.lse)
        plan.attend((query, query_rope), (key, key_rope), value, out, lse)
        return out, _NO_LSE if lse is None else lse[..., None]

    def renewed(self, changed: Mapping[str, Any]) -> _CompiledStep | None:
        """A further step that has other key lengths and blocks; see :class:`CallSeries`."""
        lengths, table = "actual_seq_lengths_kv", "block_table"
        if not {lengths} <= changed.keys() <= {lengths, table}:
            return None
        plan = self.plan.renewed(changed[lengths], changed.get(table, self.plan.table))
        return None if plan is None else _CompiledStep(self.lse, plan)


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
        out, lse = _step_outputs(query, plan.value_size, len(plan.rows), lse=call.lse)
        plan.attend(query, keys, values, out, lse)
        return out, _NO_LSE if lse is None else lse[..., None]


def _step_outputs(
    query: torch.Tensor, size: int, computed: int, *, lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where a step writes [rows, N, size] and, if it is wanted, the lse [rows, N]."""
    shape = (*query.shape[:2], size)
    out = query.new_empty(shape) if computed == len(query) else query.new_zeros(shape)
    if not lse:
        return out, None
    return out, torch.full(query.shape[:2], float("inf"), dtype=torch.float32)


@attrs.frozen(eq=False)
class _Decoded:
    """Requests of one row that are decoded in place.

    Attributes:
        spans: The requests.
        caches: Where they read; see :func:`legible_caches`.
        compiled: Whether the compiled loop takes them.
    """

    spans: list[Span]
    caches: tuple[torch.Tensor, ...]
    compiled: bool


def _split(call: Call, spans: Sequence[Span]) -> tuple[_Decoded | None, list[Span]]:
    """Requests that are decoded in place, and the others that have rows and keys."""
    computed = [span for span in spans if span.q_len and span.kv_len]
    single = [span for span in computed if span.q_len == 1]
    caches = legible_caches(call) if single else ()
    compiled = bool(caches) and attends(call, single)
    if not caches or not (compiled or caches[0][0].numel() >= LARGE_BLOCK):
        return None, computed
    return _Decoded(single, caches, compiled), [span for span in computed if span.q_len > 1]


def _decode(results: Results, decoded: _Decoded, query: torch.Tensor) -> None:
    """Requests to decode beside others; query [rows, N, D or D + rope]."""
    call, spans = results.call, decoded.spans
    out, lse = torch.empty_like(results.out), results.lse.to(query.dtype)
    *keys, value = decoded.caches
    if decoded.compiled:
        key, *ropes = keys
        own, turned = query.split_with_sizes([key.shape[3], query.shape[2] - key.shape[3]], -1)
        parts = (own, turned) if ropes else (own, None)
        plan = CompiledPlan.of(call, spans, parts, decoded.caches, lse=True)
        plan.attend(parts, (key, ropes[0] if ropes else None), value, out, lse)
    else:
        DecodePlan.of(call, spans, keys, value).attend(query, keys, value, out, lse)
    rows = torch.tensor([span.start for span in spans])
    results.put(rows, out[rows], lse[rows])


def _tiled(p: Problem, spans: list[Span]) -> list[Bucket]:
    rows = max(_SCORES // (p.call.heads * p.values.unit), 1)
    return buckets(spans, most_rows=min(rows, 1024), most=rows, most_runs=_WHOLE)


def _put(results: Results, bucket: Bucket, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write outputs [R, N, n, VD] and lse [R, N, n] (-inf: no keys) of a bucket's rows."""
    part, lse = (tensor.transpose(1, 2).flatten(0, 1) for tensor in result)
    results.put(bucket.rows.reshape(-1), part, lse)

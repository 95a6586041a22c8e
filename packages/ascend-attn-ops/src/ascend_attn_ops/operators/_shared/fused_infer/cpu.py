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
from .decode import DecodeGroup, DecodePlan, decode_groups, joined, reads_in_place
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
        *keys, values = block_caches(call, call.first_key, call.key_rope, call.first_value)
        for group in decode_groups(call, decoded):
            plan = DecodePlan.of(group, call, keys, values)
            _decode(results, plan, p.query, keys, values)
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
    groups = tuple(decode_groups(call, decoded))
    whole = len(groups) == 1 and groups[0].rows.tolist() == list(range(call.query.shape[0]))
    return _DecodeStep(call, groups, whole).run


@attrs.frozen(eq=False)
class _DecodeStep:
    """A step in which every request with keys is decoded in place.

    Attributes:
        call: Of one of its layers; only shapes, strides, lengths and scalars of it are used.
        groups: Its requests.
        whole: Whether there is one group, of all query rows in order.
    """

    call: Call
    groups: tuple[DecodeGroup, ...]
    whole: bool
    _plans: dict[int, list[DecodePlan]] = attrs.field(factory=dict, init=False)

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
        plans = self._plans.get(len(keys))
        if plans is None:
            plans = [DecodePlan.of(group, call, keys, values) for group in self.groups]
            self._plans[len(keys)] = plans
        if self.whole and not call.lse:
            out, _ = plans[0].attend(query, keys, values, lse=False)
            return out, query.new_empty(0, dtype=torch.float32)
        results = Results.of(call, len(query), query.dtype)
        for plan in plans:
            _decode(results, plan, query, keys, values)
        return results.out, results.lse[..., None] if call.lse else results.lse.new_empty(0)


def _split(call: Call, spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Requests that are decoded in place, and the others that have rows and keys."""
    computed = [span for span in spans if span.q_len and span.kv_len]
    if not reads_in_place(call):
        return [], computed
    decoded = [span for span in computed if span.q_len == 1]
    return decoded, [span for span in computed if span.q_len > 1]


def _decode(
    results: Results,
    plan: DecodePlan,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    value: torch.Tensor,
) -> None:
    rows, call = plan.group.rows, results.call
    lse = call.lse or call.sink is not None
    results.put(rows, *plan.attend(query[rows], keys, value, lse=lse))


def _tiled(p: Problem, spans: list[Span]) -> list[Bucket]:
    rows = max(_SCORES // (p.call.heads * p.values.unit), 1)
    return buckets(spans, most_rows=min(rows, 1024), most=rows, most_runs=_WHOLE)


def _put(results: Results, bucket: Bucket, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write outputs [R, N, n, VD] and lse [R, N, n] (-inf: no keys) of a bucket's rows."""
    part, lse = (tensor.transpose(1, 2).flatten(0, 1) for tensor in result)
    results.put(bucket.rows.reshape(-1), part, lse)

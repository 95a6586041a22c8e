"""Plans of the flash_attn operator: one per geometry and step, shared by all layers.

A plan is a work split that depends on the lengths of a step and on the geometry of a layer. Making
it is the largest part of a draft step's host preparation, and layers of one model nearly always
share a geometry. So a step's lengths are one object (:class:`StepLengths`), and the cache keeps a
plan for each (lengths, geometry, core counts) that it was asked for.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import attrs
import torch

from ascend_attn_ops import (
    FlashAttnArguments,
    FlashAttnMetadataArguments,
    FlashAttnPlan,
    current_profile,
)

from .errors import PlanMismatchError


@attrs.frozen(eq=False, kw_only=True)
class StepLengths:
    """The lengths of one step, on the device. Nobody reads them on the host, nobody writes them.

    Attributes:
        query_starts: ``[num_reqs + 1]`` int32, monotone.
        seq_lens: ``[num_reqs]`` int32 keys of each request, at least 1.
        used_query_lens: ``[num_reqs]`` int32 query tokens that count, or None where all do.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    used_query_lens: torch.Tensor | None = None


@attrs.frozen(kw_only=True)
class PlanGeometry:
    """Everything but the lengths that changes a plan; layers with equal geometry share plans.

    Attributes:
        num_heads: Query heads N.
        num_kv_heads: Key/value heads KN.
        head_size: Elements per head D.
        mask_mode: 0 none, 3 causal, 4 window.
        win_left: Keys before the own position that are seen in mode 4, else -1.
        win_right: Keys after the own position that are seen in mode 4, else -1.
        layout_kv: Layout of the paged cache, ``"PA_BBND"`` or ``"PA_BNBD"``.
        max_query_len: Longest query, or a bound above it.
        max_seq_len: Most keys of a request, or a bound above it.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    mask_mode: int
    win_left: int
    win_right: int
    layout_kv: str
    max_query_len: int
    max_seq_len: int

    def arguments(self, lengths: StepLengths) -> FlashAttnMetadataArguments:
        """The call of flash_attn_metadata for this geometry and these lengths."""
        return FlashAttnMetadataArguments(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            cu_seqlens_q=lengths.query_starts,
            seqused_q=lengths.used_query_lens,
            seqused_kv=lengths.seq_lens,
            batch_size=lengths.seq_lens.shape[0],
            max_seqlen_q=self.max_query_len,
            max_seqlen_kv=self.max_seq_len,
            mask_mode=self.mask_mode,
            win_left=self.win_left,
            win_right=self.win_right,
            layout_q="TND",
            layout_kv=self.layout_kv,
            layout_out="TND",
        )


_Cores = tuple[int | None, int | None] | None
_Key = tuple[int, PlanGeometry, _Cores]


class PlanCache:
    """Plans by step, geometry and core counts, with public counters. Safe to share by threads.

    A plan is dropped when its step's lengths are, and the plan that was used longest ago when there
    are more than ``max_plans``. Dropping costs time, never correctness: the plan is built again.

    Args:
        max_plans: Most plans that are kept; one takes ``64 * (cube + vector cores) * num_reqs *
            num_kv_heads`` bytes on the device. Steps that live at the same time times geometries.

    Raises:
        ValueError: ``max_plans`` is below 1.
    """

    def __init__(self, max_plans: int = 32) -> None:
        if max_plans < 1:
            raise ValueError(f"max_plans: found {max_plans}; allowed: at least 1")
        self.max_plans = max_plans
        self._plans: OrderedDict[_Key, FlashAttnPlan] = OrderedDict()
        self._lock = threading.RLock()  # a dying step may interrupt any line of its own thread
        self._builds = self._hits = self._evictions = 0

    @property
    def builds(self) -> int:
        """Plans that were built since the cache was made."""
        return self._builds

    @property
    def hits(self) -> int:
        """Times that a kept plan was handed out since the cache was made."""
        return self._hits

    @property
    def evictions(self) -> int:
        """Plans that were dropped because there were more than ``max_plans``."""
        return self._evictions

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, lengths: StepLengths, geometry: PlanGeometry) -> FlashAttnPlan:
        """The plan of a step for a geometry, on the profile of the context.

        Raises:
            ascend_attn_ops.OpArgumentError: flash_attn_metadata refuses the arguments.
        """
        key = (id(lengths), geometry, _current_cores())
        with self._lock:
            known = self._plans.get(key)
            if known is not None:
                self._hits += 1
                self._plans.move_to_end(key)
                return known
            plan = FlashAttnPlan.build(geometry.arguments(lengths))
            self._builds += 1
            self._keep(key, plan, lengths)
            return plan

    def clear(self) -> None:
        """Drop every plan; the counters stay."""
        with self._lock:
            self._plans.clear()

    def _keep(self, key: _Key, plan: FlashAttnPlan, lengths: StepLengths) -> None:
        if all(step != key[0] for step, _, _ in self._plans):
            weakref.finalize(lengths, self._forget, key[0]).atexit = False
        self._plans[key] = plan
        while len(self._plans) > self.max_plans:
            self._plans.popitem(last=False)
            self._evictions += 1

    def _forget(self, step: int) -> None:
        """The lengths with this id are gone, so the id may come to mean other lengths."""
        with self._lock:
            for key in [key for key in self._plans if key[0] == step]:
                del self._plans[key]


def _current_cores() -> _Cores:
    profile = current_profile()
    return None if profile is None else (profile.cube_cores, profile.vector_cores)


def require_fitting_plan(plan: FlashAttnPlan, call: FlashAttnArguments) -> None:
    """Refuse a plan that was made for another call; device lengths are not read.

    Args:
        plan: The plan.
        call: The flash_attn call that is to use it.

    Raises:
        PlanMismatchError: Geometry, mask, layout, bounds or lengths differ; names each one.
    """
    refusals = plan.fits(call)
    if refusals:
        raise PlanMismatchError(refusals)

"""Operator calls without torch's dispatcher, and calls of one step prepared once for its layers.

Through ``torch.ops`` each call converts some 40 arguments to C++ and back before it is checked.
That is needed where somebody follows the operators; a layer in eager mode on a host gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Protocol

import attrs
import torch

from .context import context_choices, current_profile, current_provider, sanitizing
from .operator import Operator
from .selection import checked_provider

Tensors = Mapping[str, Any]
"""torch.Tensor or None by argument name."""
_MOST_KINDS = 256


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether a call with this tensor must go through ``torch.ops``.

    It must on a device, for tensor subclasses (fake tensors), under a dispatch mode (a recorder,
    a tracer) and while torch compiles.
    """
    return (
        torch.compiler.is_compiling()  # first: a compiler cannot follow the other questions
        or tensor.__class__ is not torch.Tensor
        or not tensor.is_cpu
        or torch._C._len_torch_dispatch_stack() > 0
    )


def call(op: Operator[Any], tensors: Tensors, **arguments: Any) -> Any:
    """What ``torch.ops.ascend_attn.<op>`` does, by the shortest way that is right.

    Args:
        op: The operator.
        tensors: What differs from layer to layer or from step to step, by name; the first is
            present and decides on the way.
        **arguments: The other arguments.

    Raises:
        OpArgumentError: The contract, or the product's limits, are broken.
        SanitizerError: Tensor values are illegal (only when sanitizing).
        NoProviderError: No provider takes the call.
    """
    if is_followed(_first(tensors)):
        return getattr(torch.ops.ascend_attn, op.name)(**tensors, **arguments)
    return op(**tensors, **arguments)


class RenewableCall(Protocol):
    """A prepared call that a further step need not prepare anew."""

    def __call__(self, **tensors: Any) -> Any:
        """Outputs for tensors of the shapes that it was prepared for."""

    def renewed(self, changed: Mapping[str, Any]) -> RenewableCall | None:
        """The call with other values of these arguments.

        None, unless it knows that the contract holds for these values as it held for the old ones.
        """


@attrs.frozen(eq=False)
class CallSeries:
    """The last calls of a kind, from which those of a further step are made where nothing but
    lengths and blocks has changed.

    It keeps no tensors of layers.
    """

    _last: dict[Hashable, tuple[Mapping[str, Any], RenewableCall]] = attrs.field(
        factory=dict, init=False
    )

    def renewed(self, kind: Hashable, arguments: Mapping[str, Any]) -> RenewableCall | None:
        """The last call of a kind with new arguments, or None where it must be prepared."""
        known = self._last.get(kind)
        if known is None or known[0].keys() != arguments.keys():
            return None
        old, call = known
        return call.renewed({
            name: value
            for name, value in arguments.items()
            if value is not old[name] and (isinstance(value, torch.Tensor) or value != old[name])
        })  # fmt: skip

    def keep(self, kind: Hashable, arguments: Mapping[str, Any], ready: Any) -> None:
        """Remember a call, if it is one that can be renewed."""
        if not hasattr(ready, "renewed"):
            return
        if len(self._last) >= _MOST_KINDS:
            self._last.clear()
        self._last[kind] = (arguments, ready)


@attrs.frozen(eq=False)
class StepCalls:
    """Calls of one step that its layers repeat with tensors of their own.

    The first call of a kind is checked and planned; the following ones, whose tensors have the same
    shapes, strides and dtypes, are only computed. What is not a layer's own (lengths, block table,
    mask, scalars) belongs to the step: nobody may write it while the step lasts. A layer may keep
    one for calls without any such argument.

    Environment variables are read when a call is prepared, the context at every call. In a series
    of steps, a call is prepared when more than its lengths and blocks changes.

    Attributes:
        series: Calls of earlier steps of the same layers, or None.
    """

    series: CallSeries | None = None
    _ready: dict[Hashable, Callable[..., Any]] = attrs.field(factory=dict, init=False)

    def __call__(
        self,
        op: Operator[Any],
        tensors: Tensors,
        kind: Hashable,
        fixed: Callable[[], Mapping[str, Any]],
    ) -> Any:
        """Outputs of the operator.

        Args:
            op: The operator.
            tensors: What differs from layer to layer or from step to step, by name; the first is
                present and decides on the way.
            kind: Equal for calls whose other arguments are equal, as far as they differ in a step.
            fixed: Makes the other arguments; asked only where a call is not prepared yet.

        Raises:
            OpArgumentError: The contract, or the product's limits, are broken.
            SanitizerError: Tensor values are illegal (only when sanitizing).
            NoProviderError: No provider takes the call.
        """
        if is_followed(_first(tensors)):
            return call(op, tensors, **fixed())
        own = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors.values()]
        key = (op.name, kind, *context_choices(), *own)
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) >= _MOST_KINDS:
                self._ready.clear()
            ready = self._ready[key] = self._prepare(key, op, tensors, fixed())
        return ready(**tensors)

    def _prepare(
        self, key: Hashable, op: Operator[Any], tensors: Tensors, fixed: Mapping[str, Any]
    ) -> Callable[..., Any]:
        if self.series is None:
            return _prepared(op, tensors, fixed)
        ready = self.series.renewed(key, fixed) or _prepared(op, tensors, fixed)
        self.series.keep(key, fixed, ready)
        return ready


def _first(tensors: Tensors) -> torch.Tensor:
    first: torch.Tensor = next(iter(tensors.values()))
    return first


def _prepared(op: Operator[Any], tensors: Tensors, fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """Check a call; what computes further ones that differ in the values of ``tensors``."""
    if sanitizing():
        return partial(op, **fixed)
    args = op.bind(**tensors, **fixed)
    chosen = checked_provider(op, args, current_profile(), current_provider())
    ready = chosen.prepare(args)
    return ready or (lambda **own: chosen.run(op.bind(**own, **fixed)))

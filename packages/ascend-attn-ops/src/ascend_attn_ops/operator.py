"""One record per operator: contract, outputs, providers, samples, tolerances."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import attrs
import torch

from ascend_hwprofile import HardwareProfile

from . import arguments as records
from .context import current_profile, current_provider, sanitizing, use_profile
from .contract import Contract
from .refusals import OpArgumentError, Refusal, SanitizerError

A = TypeVar("A")


@attrs.frozen
class TensorMeta:
    """Shape (named dimensions in the operator's documents) and dtype of one output."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _no_gap(args: Any) -> str | None:
    return None


@attrs.frozen
class Provider:
    """One implementation of an operator.

    Attributes:
        name: ``reference``, ``cpu``, ``torch_npu``, ``cann_ops_transformer`` or ``aclnn``.
        run: Computes the outputs from an argument record; in-place operators return None.
        gap: Says which part of a legal request the provider does not implement, or None.
        host: Whether it computes on CPU tensors and takes what only CANN refuses.
        uploads: Whether it takes CPU tensors, too, and copies them to the device and back.
        prepare: Works out what a call's lengths and tables decide, for :class:`StepCalls`: returns
            what computes the outputs from the tensors (by name) of further calls of the same
            shapes, or None where :attr:`run` will do.
    """

    name: str
    run: Callable[[Any], Any]
    gap: Callable[[Any], str | None] = _no_gap
    host: bool = True
    uploads: bool = False
    prepare: Callable[[Any], Callable[..., Any] | None] = lambda args: None


@attrs.frozen
class NpuCall:
    """The exact call of a vendor function, as data, so that it can be checked without an NPU.

    Attributes:
        function: Name in the vendor module, e.g. ``npu_fused_infer_attention_score``.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@attrs.frozen
class Tolerance:
    """Vendor's comparison: ``|a - b| <= atol + rtol * |b|`` for all but ``outliers`` of the rows.

    Attributes:
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        outliers: Fraction of elements that may lie outside.
    """

    rtol: float
    atol: float
    outliers: float = 0.0


@attrs.frozen
class Sample:
    """A named argument set: a legal one, or an illegal one with the rules it breaks.

    Attributes:
        name: Short label.
        data: Arguments by name in the form of :func:`ascend_attn_ops.arguments.from_data`.
        profile: Profile name it is judged for, or None.
        rules: Ids (without operator) of the rules it must break; empty for a legal sample.
    """

    name: str
    data: Mapping[str, Any]
    profile: str | None = None
    rules: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Operator(Generic[A]):
    """An executable CANN operator contract; calling it runs the operator.

    Attributes:
        contract: Rules and limits.
        record: Class of the argument record.
        returns: Return annotation of the torch schema.
        outputs: Shapes and dtypes of the outputs for legal arguments.
        providers: Implementations by name.
        npu_calls: Vendor calls (as data) by provider name.
        tolerances: Vendor tolerance per dtype.
        samples: Legal and illegal argument sets that drive the tests and the documents.
    """

    contract: Contract[A]
    record: type[A]
    returns: str
    outputs: Callable[[A], tuple[TensorMeta, ...]]
    providers: Mapping[str, Provider]
    npu_calls: Mapping[str, Callable[[A], NpuCall]] = attrs.field(factory=dict)
    tolerances: Mapping[torch.dtype, Tolerance] = attrs.field(factory=dict)
    samples: Callable[[], Iterator[Sample]] = lambda: iter(())

    @property
    def name(self) -> str:
        """CANN's name of the operator without the ``npu_`` prefix."""
        return self.contract.name

    @property
    def schema(self) -> str:
        """torch schema: name, parameters, returns."""
        return self.name + records.torch_schema(self.record, self.returns)

    @property
    def signature(self) -> inspect.Signature:
        """Python signature of the argument record."""
        return inspect.signature(self.record)

    def bind(self, *args: Any, **kwargs: Any) -> A:
        """The argument record for a call with these arguments.

        Raises:
            TypeError: Arguments are missing, unknown or given twice.
        """
        return self.record(*args, **kwargs)

    def __call__(
        self,
        *args: Any,
        profile: HardwareProfile | None = None,
        provider: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Check the arguments and run the operator; see the record for the parameters.

        Args:
            *args: Positional arguments of the record.
            profile: Hardware the call is judged for; default: the context's.
            provider: Provider to use; default: the first that takes the call.
            **kwargs: Keyword arguments of the record.

        Raises:
            OpArgumentError: The contract, or the product's limits, are broken.
            SanitizerError: Tensor values are illegal (only when sanitizing).
            NoProviderError: No provider takes the call.
        """
        return run(self, self.bind(*args, **kwargs), profile=profile, provider=provider)


def run(
    op: Operator[Any],
    args: Any,
    *,
    profile: HardwareProfile | None = None,
    provider: str | None = None,
) -> Any:
    """Check ``args`` and compute; see :meth:`Operator.__call__`."""
    if profile is None:
        return _run(op, args, current_profile(), provider)
    with use_profile(profile):  # providers and output shapes may depend on it
        return _run(op, args, profile, provider)


def _run(
    op: Operator[Any], args: Any, profile: HardwareProfile | None, provider: str | None
) -> Any:
    from .selection import checked_provider

    chosen = checked_provider(op, args, profile, provider or current_provider())
    if sanitizing():
        refusals = op.contract.broken_values(args, profile)
        if refusals:
            raise SanitizerError(op.name, refusals, inputs=records.describe(args))
    return chosen.run(args)


def refuse(op: Operator[Any], args: Any, refusals: list[Refusal], profile: Any) -> None:
    """Raise OpArgumentError when there are refusals."""
    if refusals:
        name = None if profile is None else profile.soc_name
        raise OpArgumentError(op.name, refusals, inputs=records.describe(args), profile=name)

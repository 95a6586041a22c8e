"""What happened on the emulated device: operator calls and counters of the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

_PLAIN_FORMATS = frozenset({"ND", "NCL", "NCHW", "NHWC", "NCDHW"})


@attrs.frozen
class TensorArgument:
    """A tensor argument of a call: its description, not its data.

    Attributes:
        dtype: Name as torch has it, e.g. ``bfloat16``.
        shape: Sizes of the view.
        strides: Strides of the view in elements.
        format: aclFormat by name. torch_npu calls plain data ND, NCL, NCHW or NCDHW, by its rank.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = attrs.field(eq=False)
    format: str = attrs.field(default="ND", eq=False)

    @classmethod
    def of(
        cls, tensor: torch.Tensor, format_name: str = "ND", dtype: str | None = None
    ) -> TensorArgument:
        """Description of a tensor; ``dtype`` names a type that torch lacks."""
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tuple(tensor.stride()), format_name)

    def __str__(self) -> str:
        layout = "" if self.format in _PLAIN_FORMATS else f" {self.format}"
        return f"{self.dtype}{list(self.shape)}{layout}"


@attrs.frozen
class Call:
    """One call of an aclnn operator (its first stage), in the order in which they came.

    Attributes:
        operator: Full name, e.g. ``aclnnSparseFlashAttention``.
        arguments: Inputs and outputs by the vendor's name in snake case: TensorArgument, lists of
            them, numbers, texts, lists of numbers, None for a null pointer.
        refused: What the operator refused the call with, or None.
        raw: In dump mode, the argument registers and stack of an operator that is not emulated.
    """

    operator: str
    arguments: Mapping[str, Any]
    refused: str | None = None
    raw: str | None = None

    def described(self) -> dict[str, Any]:
        """The arguments as plain data: tensors as ``"bfloat16[4, 16, 512]"``."""
        return {name: _plain(value) for name, value in self.arguments.items()}

    def __str__(self) -> str:
        inside = self.raw or ", ".join(f"{k}={v}" for k, v in self.described().items())
        return f"{self.operator}({inside}){'' if self.refused is None else ' REFUSED'}"


def _plain(value: Any) -> Any:
    if isinstance(value, TensorArgument):
        return str(value)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


class Counters(Mapping[str, int]):
    """Counters of the runtime by name, as mapping and as attributes; subtraction gives a span.

    Names: ``host_to_device_copies``, ``device_to_host_copies``, ``stream_synchronisations``,
    ``allocations``, ``launches``, ``graph_replays`` and the others of csrc/emulator.h.
    """

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __getattr__(self, name: str) -> int:
        try:
            return self.__dict__["_values"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"no counter {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters({name: value - earlier[name] for name, value in self._values.items()})

    def __repr__(self) -> str:
        seen = {name: value for name, value in self._values.items() if value}
        return f"Counters({seen})"

    @property
    def synchronisations(self) -> int:
        """Times the host waited: for a stream, a device or an event."""
        return (
            self.stream_synchronisations
            + self.device_synchronisations
            + self.event_synchronisations
        )


@attrs.define(eq=False)
class Recording:
    """What happened while :meth:`Emulator.record` was open, up to now while it still is.

    Attributes:
        calls: Operator calls, refused ones included.
    """

    calls: list[Call] = attrs.field(factory=list)
    _read: Any = attrs.field(default=None, repr=False)
    _start: Counters | None = attrs.field(default=None, repr=False)
    _end: Counters | None = attrs.field(default=None, repr=False)

    @property
    def counters(self) -> Counters:
        """Counters of the runtime since the recording began."""
        end: Counters = self._end if self._end is not None else self._read()
        assert self._start is not None  # noqa: S101 - set when the recording was opened
        return end - self._start

    @property
    def operators(self) -> list[str]:
        """Names of the operators called, in order."""
        return [call.operator for call in self.calls]

    def of(self, operator: str) -> list[Call]:
        """The calls of one operator."""
        return [call for call in self.calls if call.operator == operator]

    def close(self) -> None:
        """Freeze the counters."""
        self._end = self._read()

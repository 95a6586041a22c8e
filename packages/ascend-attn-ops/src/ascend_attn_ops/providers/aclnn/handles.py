"""aclTensor and the other handles of one call: created for it, destroyed after it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from ...aclnn_abi import CTYPES, Parameter, dtype_number
from ...operators._shared.formats import FRACTAL_NZ, ND
from .arrays import Layout
from .counters import Counters
from .errors import ArrayError, HandleError
from .libraries import Cann

_POINTERS = frozenset(kind for kind, ctype in CTYPES.items() if ctype is ctypes.c_void_p)
_ARRAYS: Mapping[str, tuple[str, Any]] = {
    "ints": ("IntArray", ctypes.c_int64),
    "floats": ("FloatArray", ctypes.c_float),
    "bools": ("BoolArray", ctypes.c_bool),
}
# A Python number becomes the type that torch's scalars have.
_SCALARS: tuple[tuple[type, str, Any], ...] = (
    (bool, "bool", ctypes.c_bool),
    (int, "int64", ctypes.c_int64),
    (float, "float64", ctypes.c_double),
)


class Handles:
    """A context in which handles live; all of them end with it, the newest first."""

    def __init__(self, cann: Cann, counters: Counters) -> None:
        self._cann = cann
        self._counters = counters
        self._live: list[tuple[str, int]] = []

    def __enter__(self) -> Handles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Destroy every handle; a failing one does not keep the others alive.

        Raises:
            CannError: The first failure, after all were tried.
        """
        failures = []
        while self._live:
            kind, handle = self._live.pop()
            symbol = f"aclDestroy{kind}"
            code = self._cann.function(symbol)(handle)
            if code == 0:
                self._counters.destroyed[kind] += 1
            else:
                failures.append((code, symbol))
        for code, symbol in failures:
            self._cann.check(code, symbol)

    def _create(self, kind: str, *arguments: Any) -> int:
        symbol = f"aclCreate{kind}"
        handle: int | None = self._cann.function(symbol, result=ctypes.c_void_p)(*arguments)
        if not handle:
            raise HandleError(symbol, self._cann.recent_message())
        self._counters.created[kind] += 1
        self._live.append((kind, handle))
        return handle

    def tensor(self, layout: Layout, address: int | None) -> int:
        """An aclTensor (ND, or FRACTAL_NZ) on memory that begins with its first element."""
        rank = len(layout.shape)
        try:
            dtype = dtype_number(layout.dtype)
        except KeyError:
            raise ArrayError(f"dtype {layout.dtype}: CANN has no such type") from None
        sizes = (ctypes.c_int64 * rank)(*layout.shape)
        steps = (ctypes.c_int64 * rank)(*layout.strides)
        form = ND if layout.storage is None else FRACTAL_NZ
        stored = (layout.elements,) if layout.storage is None else layout.storage
        storage = (ctypes.c_int64 * len(stored))(*stored)
        return self._create(
            "Tensor", ctypes.cast(sizes, ctypes.c_void_p), rank, dtype,
            ctypes.cast(steps, ctypes.c_void_p), 0, form,
            ctypes.cast(storage, ctypes.c_void_p), len(stored), address,
        )  # fmt: skip

    def tensors(self, members: Sequence[int]) -> int:
        """An aclTensorList of tensors made here; the list then owns them, as CANN's lists do."""
        return self._own("Tensor", members)

    def scalar(self, value: float) -> int:
        """An aclScalar of a Python number."""
        kind = next((entry for entry in _SCALARS if isinstance(value, entry[0])), None)
        if kind is None:
            raise ArrayError(f"a scalar: found {value!r}; allowed: a bool, int or float")
        _, name, ctype = kind
        box = ctype(value)
        return self._create("Scalar", ctypes.addressof(box), dtype_number(name))

    def scalars(self, values: Sequence[float]) -> int:
        """An aclScalarList; it owns its members."""
        return self._own("Scalar", [self.scalar(value) for value in values])

    def _own(self, kind: str, members: Sequence[int]) -> int:
        values = (ctypes.c_void_p * len(members))(*members)
        handle = self._create(f"{kind}List", ctypes.cast(values, ctypes.c_void_p), len(members))
        self._live = [entry for entry in self._live if entry[1] not in set(members)]
        self._counters.destroyed[kind] += len(members)  # from now on with the list
        return handle

    def array(self, kind: str, values: Sequence[Any]) -> int:
        """An aclIntArray, aclFloatArray or aclBoolArray; ``kind`` as in aclnn_abi."""
        name, ctype = _ARRAYS[kind]
        box = (ctype * len(values))(*values)
        return self._create(name, ctypes.cast(box, ctypes.c_void_p), len(values))

    def argument(self, parameter: Parameter, value: Any, tensor: Callable[[Any], int]) -> Any:
        """C value of an argument; ``tensor`` makes the handle of a tensor.

        Raises:
            ArrayError: The value has the wrong kind.
        """
        if value is None and parameter.kind in _POINTERS:
            return None
        makers: dict[str, Callable[[Any], Any]] = {
            "tensor": tensor,
            "tensors": lambda entries: self.tensors([tensor(entry) for entry in entries]),
            "scalar": self.scalar,
            "scalars": self.scalars,
            "str": lambda text: text.encode(),
            "dtype": lambda dtype: dtype_number(str(dtype).removeprefix("torch.")),
        }
        for kind in _ARRAYS:
            makers[kind] = partial(self.array, kind)
        try:
            return makers.get(parameter.kind, CTYPES[parameter.kind])(value)
        except ArrayError as error:
            raise ArrayError(f"{parameter.name}: {error}") from None
        except (TypeError, AttributeError) as error:
            raise ArrayError(
                f"{parameter.name}: found {value!r}; allowed: {parameter.kind}"
            ) from error

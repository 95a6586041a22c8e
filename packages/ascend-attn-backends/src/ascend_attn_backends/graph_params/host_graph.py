"""A graph for CPU tensors: records operator calls, and issues them again on the same memory.

What a device graph does with addresses, this one does with tensors: a replay reads and writes the
very tensors of the capture, and numbers that were passed by value stay as they were. A buffer that
is replaced instead of written, or a length that is not renewed, goes wrong here as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import InvalidFieldError


@attrs.frozen(eq=False)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...]

    def run(self) -> None:
        """Issue the call again; what it returns goes where the first result is."""
        again = _tensors(self.function(*self.args, **self.kwargs))
        for held, fresh in zip(self.results, again, strict=True):
            if held is not fresh and not _same_memory(held, fresh):
                held.copy_(fresh)


@attrs.define(eq=False)
class _Task:
    calls: list[_Call | _Task] = attrs.field(factory=list)

    def run(self) -> None:
        for call in self.calls:
            call.run()


class HostGraph:
    """Captured calls on CPU tensors, for tests and for simulated products.

    It also is a :class:`GraphTasks`. Renewing a task issues its calls once, at once: what they
    write is overwritten by the replay.
    """

    def __init__(self) -> None:
        self._root = _Task()
        self._open: list[_Task] = []
        self._captured = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the operator calls that are made inside the context.

        Raises:
            InvalidFieldError: The graph has been captured before.
        """
        if self._captured:
            raise InvalidFieldError("graph", "a captured graph", "a new one for each capture")
        self._captured = True
        with self._recording(), self._into(self._root):
            yield

    def capture(self, launch: Callable[[], None]) -> object:
        """Issue a call inside :meth:`capturing` as a task of its own; returns its handle.

        Raises:
            InvalidFieldError: No capture is open.
        """
        if not self._open:
            raise InvalidFieldError("graph", "no open capture", "a call inside capturing()")
        task = _Task()
        self._open[-1].calls.append(task)
        with self._into(task):
            launch()
        return task

    def update(self, handle: object, launch: Callable[[], None]) -> None:
        """Give a task the calls that ``launch`` makes now."""
        if not isinstance(handle, _Task):
            raise InvalidFieldError("handle", type(handle).__name__, "what capture() returned")
        handle.calls.clear()
        with self._recording(), self._into(handle):
            launch()

    def replay(self) -> None:
        """Issue every captured call again, in order."""
        with torch.no_grad():
            self._root.run()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        recorder = _Recorder()  # type: ignore[no-untyped-call]
        recorder.stack = self._open
        with torch.no_grad(), recorder:
            yield

    @contextmanager
    def _into(self, task: _Task) -> Iterator[None]:
        self._open.append(task)
        try:
            yield
        finally:
            self._open.pop()


class _Recorder(TorchDispatchMode):
    """Runs operator calls and keeps them in the task that was opened last."""

    stack: list[_Task]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.stack[-1].calls.append(_Call(func, args, kwargs, _tensors(result)))
        return result


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements, as with views and operations in place."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )

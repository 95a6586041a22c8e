"""A window around each attention call that KV transfer code can hook.

Code that moves keys and values between devices must not touch the blocks that an attention call is
reading. It adds a listener, and is told when such a call starts, ends or fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Protocol

from .errors import TransferWindowError


class TransferListener(Protocol):
    """What KV transfer code implements. All three are called in the thread of the attention."""

    def attention_started(self) -> None:
        """Called before the attention call. When it raises, the call does not run."""

    def attention_ended(self) -> None:
        """Called after the attention call."""

    def attention_failed(self, error: BaseException) -> None:
        """Called instead of :meth:`attention_ended` when the call, or a later listener, raised."""


_OPEN: ContextVar[bool] = ContextVar("ascend_attention_transfer_window", default=False)
_LOCK = threading.Lock()
_listeners: tuple[TransferListener, ...] = ()


@contextmanager
def transfer_listener(listener: TransferListener) -> Iterator[None]:
    """Tell ``listener`` about every window of this process while the context is open.

    Several listeners are told of a start in the order in which they were added, and of an end or a
    failure in the reverse order. A window that is open when a listener comes or goes keeps the
    listeners it started with.
    """
    global _listeners
    with _LOCK:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _LOCK:
            place = next(i for i, known in enumerate(_listeners) if known is listener)
            _listeners = _listeners[:place] + _listeners[place + 1 :]


@contextmanager
def attention_transfer_window() -> Iterator[None]:
    """Surround one attention call: start, then end or failure, for every listener.

    An exception of the attention call reaches the caller unchanged after all listeners that were
    told of the start have been told of the failure.

    Raises:
        TransferWindowError: A window is already open in this context (thread or task). The open
            window stays open.
    """
    if _OPEN.get():
        raise TransferWindowError
    token = _OPEN.set(True)
    try:
        with ExitStack() as stack:
            for listener in _listeners:
                stack.enter_context(_told(listener))
            yield
    finally:
        _OPEN.reset(token)


@contextmanager
def _told(listener: TransferListener) -> Iterator[None]:
    listener.attention_started()
    try:
        yield
    except BaseException as error:
        listener.attention_failed(error)
        raise
    listener.attention_ended()

"""Keeps KV transfers and attention calls apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TransferGate:
    """Either attention calls run, or transfers do; any number of each.

    It is a listener of `ascend_attn_backends.attention_transfer_window`: an attention call waits
    for transfers that have begun, and a transfer waits until no call is running.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._windows = 0
        self._transfers = 0

    @property
    def is_open(self) -> bool:
        """Whether a transfer could begin now."""
        return not self._windows

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Surround one transfer of keys and values, in any thread but that of an open window."""
        with self._changed:
            self._changed.wait_for(lambda: not self._windows)
            self._transfers += 1
        try:
            yield
        finally:
            with self._changed:
                self._transfers -= 1
                self._changed.notify_all()

    def attention_started(self) -> None:
        """Wait for the transfers that have begun, and hold those that have not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._transfers)
            self._windows += 1

    def attention_ended(self) -> None:
        """Let transfers go on, if this was the last call."""
        with self._changed:
            self._windows -= 1
            self._changed.notify_all()

    def attention_failed(self, error: BaseException) -> None:
        """As the end of a call."""
        self.attention_ended()

"""The errors this package raises."""

from __future__ import annotations

from collections.abc import Iterable


class SpecDecodeError(Exception):
    """Base of every error raised by ascend-specdecode."""


class ArgumentError(SpecDecodeError, ValueError):
    """An argument is not allowed; the message names it, what was found and what is allowed."""

    def __init__(self, name: str, found: object, allowed: str) -> None:
        self.name = name
        self.found = found
        self.allowed = allowed
        super().__init__(f"{name}: found {found}, allowed {allowed}")


class _SequencesError(SpecDecodeError):
    """An error that concerns named sequences of a batch and no others."""

    def __init__(self, message: str, sequence_ids: Iterable[int]) -> None:
        self.sequence_ids = frozenset(sequence_ids)
        listed = ", ".join(str(one) for one in sorted(self.sequence_ids))
        super().__init__(f"{message} (sequences {listed})")


class DrafterError(_SequencesError):
    """Raised by a drafter: these sequences cannot be drafted now, the rest of the call can."""


class TargetError(_SequencesError):
    """Raised by a target: these sequences failed; the others of the batch are scored again."""

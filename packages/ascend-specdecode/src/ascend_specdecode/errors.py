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


class EngineClosedError(SpecDecodeError):
    """A request was made to an engine that is not open."""

    def __init__(self, state: str) -> None:
        super().__init__(
            f"the engine {state}; make requests inside its `async with DraftVerify(...)` block"
        )


class QueueFullError(SpecDecodeError):
    """A request found the waiting queue full, and the engine is set to refuse it."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(
            f"{waiting} requests are waiting, the limit of max_waiting; "
            "try again later, or set when_full='wait'"
        )


class ProtocolError(SpecDecodeError):
    """A drafter, target or verifier returned what its protocol does not allow."""


class MissingExtraError(SpecDecodeError, ImportError):
    """A feature needs an optional package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}, which is not installed: "
            f"pip install 'ascend-specdecode[{extra}]'"
        )

"""Errors of this package; each message names the thing, what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

from ascend_attn_ops import Refusal


class AttentionBackendError(Exception):
    """Base class of every error of this package."""


class InvalidFieldError(AttentionBackendError, ValueError):
    """A field of a record or an argument of a call breaks a rule.

    Attributes:
        field: Name of the field or argument, with the index of the first bad element if it has one.
        found: What was found.
        allowed: What is allowed.
    """

    def __init__(self, field: str, found: object, allowed: str) -> None:
        self.field = field
        self.found = found
        self.allowed = allowed
        super().__init__(f"{field}: found {found}; allowed: {allowed}")


class AttentionBatchError(InvalidFieldError):
    """A field of an :class:`AttentionBatch` breaks one of its invariants."""


class NoBackendError(AttentionBackendError, LookupError):
    """No backend of this version takes the request; the message lists every reason."""


class PlanMismatchError(AttentionBackendError, ValueError):
    """A plan is used with other arguments than it was made for.

    CANN does not notice this and computes wrong numbers.

    Attributes:
        refusals: Every argument that differs.
    """

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        self.refusals = tuple(refusals)
        reasons = "\n".join(f"  - {refusal}" for refusal in self.refusals)
        super().__init__(f"the plan belongs to another flash_attn call:\n{reasons}")


class ConfigChangedError(AttentionBackendError, RuntimeError):
    """A configuration that was to stay as it is has been edited.

    Attributes:
        path: Place of the first change.
        before: Its value before.
        after: Its value after.
    """

    def __init__(self, path: str, before: object, after: object) -> None:
        self.path, self.before, self.after = path, before, after
        super().__init__(
            f"{path}: found {after!r}; allowed: {before!r}, as before; "
            "edit a copy, the original is shared"
        )


class TransferWindowError(AttentionBackendError, RuntimeError):
    """An attention transfer window was opened inside another one."""

    def __init__(self) -> None:
        super().__init__(
            "attention_transfer_window: found a window that is already open in this context; "
            "allowed: one at a time, closed before the next one opens"
        )

"""Errors of this package; each message names the thing, what was found and what is allowed."""

from __future__ import annotations


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

"""The errors this package raises."""

from __future__ import annotations


class SpecDecodeError(Exception):
    """Base of every error raised by ascend-specdecode."""


class ArgumentError(SpecDecodeError, ValueError):
    """An argument is not allowed; the message names it, what was found and what is allowed."""

    def __init__(self, name: str, found: object, allowed: str) -> None:
        self.name = name
        self.found = found
        self.allowed = allowed
        super().__init__(f"{name}: found {found}, allowed {allowed}")

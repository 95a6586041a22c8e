"""Errors of the emulator."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """Base class of the emulator's errors."""


class EmulatorUnavailableError(EmulatorError):
    """The emulator cannot work here; the message says what is missing and what to do."""


class EmulatorOptionError(EmulatorError, ValueError):
    """A SoC, an operator or a number that was asked for does not exist."""


class BuildError(EmulatorError):
    """The compiler refused the emulator's sources; carries what it printed."""


class AlreadyActiveError(EmulatorError):
    """This process already emulates something else: torch_npu asks for its SoC only once."""

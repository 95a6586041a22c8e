"""Why an operator, a provider or a backend does not take a request."""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen
class Refusal:
    """One typed reason.

    Attributes:
        rule: Stable rule id, ``<operator>.<rule>``; ``ascend-attn-ops show RULE`` explains it.
        parameter: Name of the argument (or fact) that breaks the rule.
        found: What was found, for people.
        allowed: What is allowed, for people.
        source: Public document or code that states the rule.
        cann_code: Code that CANN would have returned (161001 null pointer, 161002 invalid
            argument, 561002 tiling failure ...), or None where CANN has no say.
    """

    rule: str
    parameter: str
    found: str
    allowed: str
    source: str
    cann_code: int | None = None

    def __str__(self) -> str:
        code = f", CANN {self.cann_code}" if self.cann_code is not None else ""
        return (
            f"{self.parameter}: found {self.found}; allowed: {self.allowed} "
            f"[{self.rule}{code}; {self.source}]"
        )

    def as_dict(self) -> dict[str, str | int | None]:
        """The refusal as plain data, in the field order of the class."""
        return attrs.asdict(self)


class AttentionOperatorError(Exception):
    """Base class of every error of this package."""


class OpArgumentError(AttentionOperatorError, ValueError):
    """The arguments of an operator break its contract.

    Attributes:
        op: Operator name.
        refusals: Every broken rule.
        inputs: Description of the arguments, one line each.
    """

    def __init__(
        self, op: str, refusals: Iterable[Refusal], *, inputs: str = "", profile: str | None = None
    ) -> None:
        self.op = op
        self.refusals = tuple(refusals)
        self.inputs = inputs
        where = f" on {profile}" if profile else ""
        count = len(self.refusals)
        lines = [f"{op}{where} refuses these arguments ({count} rule{'s'[: count != 1]} broken):"]
        lines += [f"  - {refusal}" for refusal in self.refusals]
        if inputs:
            lines += ["arguments:", inputs]
        super().__init__("\n".join(lines))


class SanitizerError(OpArgumentError):
    """Tensor values break a rule that CANN itself never checks."""


class NoProviderError(AttentionOperatorError, RuntimeError):
    """No provider takes the arguments; carries the reasons of each one."""

    def __init__(self, op: str, reasons: dict[str, tuple[Refusal, ...]], inputs: str) -> None:
        self.op = op
        self.reasons = reasons
        lines = [f"no provider of {op} takes these arguments:"]
        for provider, refusals in reasons.items():
            lines.append(f"  {provider}:")
            lines += [f"    - {refusal}" for refusal in refusals]
        lines += ["arguments:", inputs]
        super().__init__("\n".join(lines))


class UnknownOperatorError(AttentionOperatorError, KeyError):
    """There is no operator of this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        super().__init__(f"unknown operator {name!r}; known: {', '.join(sorted(known))}")

    def __str__(self) -> str:
        return str(self.args[0])


class ProviderUnavailableError(AttentionOperatorError, RuntimeError):
    """A provider was asked for by name and cannot be used here."""


class ArgumentFormatError(AttentionOperatorError, ValueError):
    """Arguments given as data (JSON) cannot be read: bad usage, not a refusal."""

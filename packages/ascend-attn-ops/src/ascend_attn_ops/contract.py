"""Rules of one operator: data in ``contract.toml``, predicates in ``rules.py``.

A rule has an id, the parameter it concerns, what is allowed, the CANN code and its source (all
data), and a predicate that returns what was found when the rule is broken, or None. Rules run in
stages, as the vendor's checkers do: a later stage may rely on what an earlier one established, so
it is not asked when an earlier one refused.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import resources
from typing import Any, Generic, TypeVar

import attrs

from ascend_hwprofile import HardwareProfile

from .arguments import on_host
from .refusals import Refusal

A = TypeVar("A")


class Stage(enum.IntEnum):
    """Order of the checks; refusals of one stage hide the following stages."""

    PRESENCE = 0
    SINGLE = 1
    EXISTENCE = 2
    FEATURE = 3
    CONSISTENCY = 4


class Scope(enum.Enum):
    """Whom a rule concerns."""

    CONTRACT = "contract"  # the mathematics needs it: every provider
    PRODUCT = "product"  # a limit of CANN on a product: wherever a profile is given
    NPU = "npu"  # CANN refuses it, the host providers take it (float32, strides ...)
    VALUE = "value"  # tensor values: only the sanitizer looks
    FORMAT = "format"  # storage formats of NPU tensors: only the sanitizer looks


@attrs.frozen
class Finding:
    """What a predicate found, when the generic text of the rule does not say enough.

    Attributes:
        found: What was found.
        allowed: Replaces the rule's text of what is allowed.
        parameter: Replaces the rule's parameter.
    """

    found: str
    allowed: str | None = None
    parameter: str | None = None


@attrs.frozen
class RuleContext:
    """What a predicate may look at besides the arguments.

    Attributes:
        profile: Hardware the call is judged for, or None for the bare contract.
        limits: Figures of the operator's ``contract.toml``.
    """

    profile: HardwareProfile | None
    limits: Mapping[str, Any]

    @property
    def family(self) -> str | None:
        """Family name (``"A2"`` ...) or None without a profile."""
        return None if self.profile is None else self.profile.family.value


Predicate = Callable[[Any, RuleContext], "str | Finding | None"]


@attrs.frozen
class Rule:
    """One rule of a contract; see the module text.

    Attributes:
        reads_lengths: Whether the predicate looks at the values of lists of host integers, which
            change from step to step. All others look at no more than how many there are.
    """

    id: str
    parameter: str
    allowed: str
    why: str
    source: str
    cann_code: int | None
    stage: Stage
    scope: Scope
    families: frozenset[str]
    reads_lengths: bool
    predicate: Predicate = attrs.field(repr=False, eq=False)

    def concerns(self, profile: HardwareProfile | None, *, host: bool) -> bool:
        """Whether the rule is asked for this profile and kind of provider."""
        if self.scope in (Scope.VALUE, Scope.FORMAT):
            return False
        if self.scope is Scope.NPU and host:
            return False
        if self.scope is not Scope.CONTRACT and profile is None:
            return False
        return not self.families or (profile is not None and profile.family.value in self.families)

    def refusal(self, found: str | Finding) -> Refusal:
        """The refusal for what the predicate found."""
        finding = Finding(found) if isinstance(found, str) else found
        return Refusal(
            rule=self.id,
            parameter=finding.parameter or self.parameter,
            found=finding.found,
            allowed=finding.allowed or self.allowed,
            source=self.source,
            cann_code=self.cann_code,
        )


def _seen_as(convert: Callable[[Any], Any], predicate: Predicate) -> Predicate:
    return lambda args, context: predicate(convert(args), context)


class ContractDataError(ValueError):
    """``contract.toml`` and ``rules.py`` of an operator do not fit together."""


@attrs.define(slots=False)
class Contract(Generic[A]):
    """The rules and limits of one operator.

    Attributes:
        name: Operator name.
        data: Parsed ``contract.toml``: ``summary``, ``sources``, ``limits`` and ``rules`` tables.
    """

    name: str
    data: Mapping[str, Any] = attrs.field(repr=False)
    _predicates: dict[str, Predicate] = attrs.field(factory=dict, repr=False)

    @classmethod
    def load(cls, package: str) -> Contract[A]:
        """Read ``contract.toml`` beside the modules of ``package``.

        Raises:
            ContractDataError: A table or key is missing.
        """
        text = resources.files(package).joinpath("contract.toml").read_text("utf-8")
        data = tomllib.loads(text)
        missing = {"name", "summary", "sources", "rules"} - data.keys()
        if missing:
            raise ContractDataError(f"{package}/contract.toml lacks {', '.join(sorted(missing))}")
        return cls(data["name"], data)

    def extended(
        self,
        package: str,
        *,
        without: frozenset[str] = frozenset(),
        seen_as: Callable[[Any], Any] | None = None,
    ) -> Contract[Any]:
        """The contract of a newer or older version of this operator.

        Args:
            package: Package with a ``contract.toml`` of its own: its limits and rules come on top
                of this contract's, or replace those of the same name.
            without: Rules of this contract that the other version does not have.
            seen_as: Turns arguments of the other version into this version's, for the predicates
                that are kept.
        """
        own = Contract[Any].load(package)
        rules = {key: entry for key, entry in self.data["rules"].items() if key not in without}
        merged = {
            **own.data,
            "limits": {**self.data.get("limits", {}), **own.data.get("limits", {})},
            "rules": {**rules, **own.data["rules"]},
        }
        kept = {
            key: predicate if seen_as is None else _seen_as(seen_as, predicate)
            for key, predicate in self._predicates.items()
            if key in rules and key not in own.data["rules"]
        }
        return Contract(own.name, merged, kept)

    @cached_property
    def limits(self) -> Mapping[str, Any]:
        """Figures by name; lists come as tuples."""
        raw = self.data.get("limits", {})
        return {
            key: tuple(entry["value"]) if isinstance(entry["value"], list) else entry["value"]
            for key, entry in raw.items()
        }

    def rule(self, key: str) -> Callable[[Predicate], Predicate]:
        """Decorator: this predicate belongs to the rule ``key`` of ``contract.toml``.

        Raises:
            ContractDataError: The file has no such rule, or it already has a predicate.
        """
        if key not in self.data["rules"]:
            raise ContractDataError(f"{self.name}: contract.toml has no rule {key!r}")
        if key in self._predicates:
            raise ContractDataError(f"{self.name}: two predicates for rule {key!r}")

        def register(predicate: Predicate) -> Predicate:
            self._predicates[key] = predicate
            return predicate

        return register

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """All rules in checking order.

        Raises:
            ContractDataError: A rule of the file has no predicate.
        """
        bare = self.data["rules"].keys() - self._predicates.keys()
        if bare:
            raise ContractDataError(f"{self.name}: rules without predicate: {sorted(bare)}")
        rules = [self._build(key, entry) for key, entry in self.data["rules"].items()]
        return tuple(sorted(rules, key=lambda rule: rule.stage))

    def _build(self, key: str, entry: Mapping[str, Any]) -> Rule:
        try:
            return Rule(
                id=f"{self.name}.{key}",
                parameter=entry["parameter"],
                allowed=entry["allowed"].format(**self.limits),
                why=entry.get("why", ""),
                source=entry["source"],
                cann_code=entry.get("code"),
                stage=Stage[entry.get("stage", "feature").upper()],
                scope=Scope(entry.get("scope", "contract")),
                families=frozenset(entry.get("families", ())),
                reads_lengths=entry.get("reads_lengths", False),
                predicate=self._predicates[key],
            )
        except (KeyError, ValueError) as error:
            raise ContractDataError(f"{self.name}: rule {key!r}: {error}") from error

    def broken(self, args: A, profile: HardwareProfile | None, *, host: bool) -> list[Refusal]:
        """Refusals of the first stage in which a rule is broken; empty when all hold."""
        context = RuleContext(profile, self.limits)
        refusals: list[Refusal] = []
        stage = Stage.PRESENCE
        for rule in self.rules:
            if refusals and rule.stage > stage:
                break
            stage = rule.stage
            if rule.concerns(profile, host=host):
                found = rule.predicate(args, context)
                if found is not None:
                    refusals.append(rule.refusal(found))
        return refusals

    @cached_property
    def length_rules(self) -> tuple[Rule, ...]:
        """The rules that read the values of host integers, marked ``reads_lengths``."""
        return tuple(rule for rule in self.rules if rule.reads_lengths)

    def lengths_hold(self, args: A, profile: HardwareProfile | None, *, host: bool) -> bool:
        """Whether the rules about lengths hold for arguments whose other rules do."""
        context = RuleContext(profile, self.limits)
        return all(
            rule.predicate(args, context) is None
            for rule in self.length_rules
            if rule.concerns(profile, host=host)
        )

    def broken_values(self, args: A, profile: HardwareProfile | None) -> list[Refusal]:
        """Refusals of the value and format rules; the values of NPU tensors are copied first."""
        context = RuleContext(profile, self.limits)
        seen = {Scope.VALUE: on_host(args), Scope.FORMAT: args}
        found = [
            (rule, rule.predicate(seen[rule.scope], context))
            for rule in self.rules
            if rule.scope in seen
        ]
        return [rule.refusal(what) for rule, what in found if what is not None]

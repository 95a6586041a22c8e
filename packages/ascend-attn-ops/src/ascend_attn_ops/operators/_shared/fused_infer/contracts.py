"""Where the shared predicates register."""

from __future__ import annotations

from collections.abc import Callable

from ....contract import Finding, RuleContext
from .call import Call

CallPredicate = Callable[[Call, RuleContext], "str | Finding | None"]
PREDICATES: dict[str, CallPredicate] = {}


def shared_rule(key: str) -> Callable[[CallPredicate], CallPredicate]:
    """Decorator: a predicate on :class:`Call` for the rule ``key``.

    A version carries the rule when the shared or its own ``contract.toml`` lists it.
    """

    def keep(predicate: CallPredicate) -> CallPredicate:
        PREDICATES[key] = predicate
        return predicate

    return keep

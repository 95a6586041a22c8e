"""Contract of one version: the shared rules and limits, then the version's own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import attrs

from ....contract import Contract, Finding, Predicate, RuleContext
from . import rules_features, rules_inputs, rules_keys
from .contracts import PREDICATES, CallPredicate

RULE_MODULES = (rules_inputs, rules_keys, rules_features)  # importing them fills PREDICATES


def load_contract(package: str, own: Mapping[str, CallPredicate]) -> Contract[Any]:
    """Contract of the version in ``package``.

    Its ``contract.toml`` may rename v1's parameters in a ``renames`` table and overrides shared
    limits and rules of the same name.
    """
    shared, version = _toml(__package__), _toml(package)
    names: Mapping[str, str] = version.get("renames", {})
    data = {
        **version,
        "limits": shared["limits"] | version.get("limits", {}),
        "rules": {key: _renamed(rule, names) for key, rule in shared["rules"].items()}
        | version.get("rules", {}),
    }
    contract: Contract[Any] = Contract(version["name"], data)
    for key in data["rules"]:
        contract.rule(key)(_on_record({**PREDICATES, **own}[key], names))
    return contract


def _toml(package: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(package).joinpath("contract.toml").read_text("utf-8"))


def _renamed(rule: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    parameter = ", ".join(names.get(part, part) for part in rule["parameter"].split(", "))
    return {**rule, "parameter": parameter}


def _on_record(predicate: CallPredicate, names: Mapping[str, str]) -> Predicate:
    def ask(args: Any, context: RuleContext) -> str | Finding | None:
        found = predicate(args.call, context)
        if isinstance(found, Finding) and found.parameter is not None:
            return attrs.evolve(found, parameter=names.get(found.parameter, found.parameter))
        return found

    return ask

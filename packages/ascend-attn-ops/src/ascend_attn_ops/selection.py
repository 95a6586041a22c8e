"""check, select and explain: the single truth about who takes a call, and why the others do not."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import attrs

from ascend_hwprofile import HardwareProfile

from . import arguments as records
from .context import PROVIDER_VARIABLE
from .operator import Operator, Provider, refuse
from .refusals import NoProviderError, ProviderUnavailableError, Refusal
from .registry import operator_named

HOST_PROVIDERS = frozenset({"reference", "cpu"})
_CACHE_SIZE = 4096
_checked: dict[Any, tuple[HardwareProfile | None, tuple[Refusal, ...]]] = {}
_chosen: dict[Any, tuple[HardwareProfile | None, Provider]] = {}
_chosen_by_shape: dict[Any, tuple[HardwareProfile | None, Provider]] = {}
"""Choices of host providers, whose gaps read no lengths, for operators whose contract says which
rules do: these are asked in every step."""


@cache
def common_rules() -> Mapping[str, Mapping[str, Any]]:
    """Rules that every operator shares, by id."""
    text = resources.files(__package__).joinpath("common.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def provider_data() -> Mapping[str, Mapping[str, Any]]:
    """Priority lists and package names of the providers."""
    text = resources.files(__package__).joinpath("providers.toml").read_text("utf-8")
    return tomllib.loads(text)


def _common(rule: str, *, parameter: str, found: str, **changes: Any) -> Refusal:
    entry = common_rules()[rule]
    return Refusal(
        rule=rule,
        parameter=parameter,
        found=found,
        allowed=changes.get("allowed") or entry["allowed"],
        source=changes.get("source") or entry["source"],
        cann_code=entry.get("code"),
    )


def check(
    op: str | Operator[Any],
    args: Any,
    profile: HardwareProfile | None = None,
    provider: str | None = None,
) -> list[Refusal]:
    """Every reason why ``op`` refuses ``args``; an empty list means accepted.

    Args:
        op: Operator or its name.
        args: Argument record of the operator, or a mapping for
            :func:`ascend_attn_ops.arguments.from_data`.
        profile: Product to judge for; None judges the bare contract.
        provider: ``"reference"`` or ``"cpu"`` leave out what only CANN refuses (float32,
            strides); any other value, and None, judge as CANN does.

    Raises:
        UnknownOperatorError: No such operator.
        ArgumentFormatError: ``args`` is a mapping that cannot be read.
    """
    found = operator_named(op) if isinstance(op, str) else op
    if isinstance(args, Mapping):
        args = records.from_data(found.record, args)
    return list(_check(found, args, profile, host=provider in HOST_PROVIDERS))


def _check(
    op: Operator[Any], args: Any, profile: HardwareProfile | None, *, host: bool
) -> tuple[Refusal, ...]:
    key = (op.name, host, id(profile), records.fingerprint(args))
    known = _checked.get(key)
    if known is not None:
        return known[1]
    refusals = tuple(_judge(op, args, profile, host=host))
    _remember(_checked, key, (profile, refusals))
    return refusals


def _remember(known: dict[Any, Any], key: Any, value: tuple[HardwareProfile | None, Any]) -> None:
    """Keep a verdict, and with it the profile, whose id is part of the key."""
    if len(known) >= _CACHE_SIZE:
        known.clear()
    known[key] = value


def _judge(
    op: Operator[Any], args: Any, profile: HardwareProfile | None, *, host: bool
) -> list[Refusal]:
    missing = [
        _common("required", parameter=parameter.name, found="nothing (null)")
        for parameter in records.parameters(op.record)
        if not parameter.optional and getattr(args, parameter.name) is None
    ]
    return missing or _product(op, profile) or op.contract.broken(args, profile, host=host)


def _product(op: Operator[Any], profile: HardwareProfile | None) -> list[Refusal]:
    if profile is None:
        return []
    support = profile.operator(op.name)
    if support.supported is not False:
        return []
    return [
        _common(
            "product",
            parameter="profile",
            found=f"{profile.soc_name} ({profile.family.value}): {support.reason}",
            source=support.source,
        )
    ]


def missing_package(provider: str) -> str | None:
    """Why what a provider needs cannot be used here, or None. Imports and loads nothing."""
    if provider == "aclnn":
        from .providers.aclnn import unavailable_reason

        return unavailable_reason()
    entry = provider_data()["packages"].get(provider)
    if entry is None or importlib.util.find_spec(entry["module"]) is not None:
        return None
    return f"package {entry['module']} is not installed; {entry['install']}"


def device_of(args: Any) -> str:
    """Device type that the call runs on: that of its first tensor."""
    for tensor in records.tensors_of(args):
        return tensor.device.type
    return "cpu"


def provider_refusals(
    op: Operator[Any], provider: Provider, args: Any, profile: HardwareProfile | None
) -> list[Refusal]:
    """Why this provider does not take the call; empty when it does."""
    missing = missing_package(provider.name)
    if missing:
        return [_common("provider_available", parameter=provider.name, found=missing)]
    device = device_of(args)
    on_cpu = provider.host or provider.uploads
    if (device == "npu" and provider.name == "cpu") or (device == "cpu" and not on_cpu):
        return [
            _common("provider_device", parameter="device", found=f"{device} tensors"),
        ]
    refusals = list(_check(op, args, profile, host=provider.host))
    gap = provider.gap(args) if not refusals else None
    if gap:
        refusals.append(_common("provider_gap", parameter=provider.name, found=gap))
    return refusals


@attrs.frozen
class Explanation:
    """Who takes a call, who does not, and why.

    Attributes:
        op: Operator name.
        profile: SoC name judged for, or None.
        chosen: Provider that :func:`select` would return, or None.
        reasons: Refusals per provider, in the order of priority.
    """

    op: str
    profile: str | None
    chosen: str | None
    reasons: Mapping[str, tuple[Refusal, ...]]

    def __str__(self) -> str:
        where = f" on {self.profile}" if self.profile else ""
        lines = [f"{self.op}{where}: {self.chosen or 'no provider takes it'}"]
        for provider, refusals in self.reasons.items():
            lines += [f"  {provider}: {refusal}" for refusal in refusals]
        return "\n".join(lines)


def explain(
    op: str | Operator[Any], args: Any, profile: HardwareProfile | None = None
) -> Explanation:
    """The verdict of every provider, as data; the arguments are those of :func:`check`."""
    found = operator_named(op) if isinstance(op, str) else op
    if isinstance(args, Mapping):
        args = records.from_data(found.record, args)
    reasons = {
        provider.name: tuple(provider_refusals(found, provider, args, profile))
        for provider in _in_order(found, device_of(args))
    }
    chosen = next((name for name, refusals in reasons.items() if not refusals), None)
    soc = None if profile is None else profile.soc_name
    return Explanation(found.name, soc, chosen, reasons)


def _in_order(op: Operator[Any], device: str) -> list[Provider]:
    order = provider_data()["priority"].get(device, provider_data()["priority"]["cpu"])
    return [op.providers[name] for name in order if name in op.providers]


def select(op: str | Operator[Any], args: Any, profile: HardwareProfile | None = None) -> Provider:
    """The first provider of the priority list that takes the call.

    Raises:
        NoProviderError: None takes it; the error carries the reasons of each.
    """
    found = operator_named(op) if isinstance(op, str) else op
    explanation = explain(found, args, profile)
    if explanation.chosen is None:
        raise NoProviderError(found.name, dict(explanation.reasons), records.describe(args))
    return found.providers[explanation.chosen]


def checked_provider(
    op: Operator[Any], args: Any, profile: HardwareProfile | None, name: str | None
) -> Provider:
    """The provider to run, after the arguments passed the contract; results are remembered.

    Raises:
        OpArgumentError: The arguments break a rule.
        ProviderUnavailableError: None of the providers in ``name`` takes the call.
        NoProviderError: No provider takes the call.
    """
    found, kind = records.fingerprint(args), (op.name, name, id(profile))
    host = device_of(args) == "cpu"
    by_shape = host and bool(op.contract.length_rules)
    shape = (*kind, records.without_lengths(found)) if by_shape else None
    if shape is not None:
        known = _chosen_by_shape.get(shape)
        if known is not None and op.contract.lengths_hold(args, profile, host=host):
            return known[1]  # a further step: the lengths have changed, and nothing else
    known = _chosen.get((*kind, found))
    if known is not None:
        return known[1]
    refuse(op, args, list(_check(op, args, profile, host=host)), profile)
    provider = _named(op, args, profile, name) if name else select(op, args, profile)
    if provider.host and shape is not None:
        _remember(_chosen_by_shape, shape, (profile, provider))
    else:
        _remember(_chosen, (*kind, found), (profile, provider))
    return provider


def _named(op: Operator[Any], args: Any, profile: HardwareProfile | None, names: str) -> Provider:
    """The first of the providers that were asked for that takes the call."""
    reasons = []
    for name in (part.strip() for part in names.split(",")):
        if name not in op.providers:
            reasons.append(f"  - {name}: {_absent(op, name)}")
            continue
        refusals = provider_refusals(op, op.providers[name], args, profile)
        if not refusals:
            return op.providers[name]
        reasons += [f"  - {name}: {refusal}" for refusal in refusals]
    raise ProviderUnavailableError(
        f"{op.name}: no provider that {PROVIDER_VARIABLE} or use_provider names takes the call:\n"
        + "\n".join(reasons)
        + f"\nIt has: {', '.join(op.providers)}. Several are tried in their order, as in "
        f"{PROVIDER_VARIABLE}=cpu,reference."
    )


def _absent(op: Operator[Any], name: str) -> str:
    known = sorted({one for order in provider_data()["priority"].values() for one in order})
    why = provider_data()["absent"].get(name, {}).get(op.name)
    if why is not None:
        return str(why)
    if name in known:
        return f"{op.name} has no such provider"
    return f"there is no provider {name!r}; allowed: {', '.join(known)}"

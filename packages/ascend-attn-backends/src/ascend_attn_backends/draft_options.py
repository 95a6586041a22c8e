"""What a draft's configuration must not do: impossible options, edits of the target, lone steps."""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from importlib import resources
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ascend_attn_ops import Refusal

from .errors import ConfigChangedError, InvalidFieldError

if TYPE_CHECKING:
    from .context_parallel import DCPGroup


def draft_option_refusals(options: Mapping[str, object]) -> list[Refusal]:
    """Every combination of these options that never works, for a check at start.

    Args:
        options: Option names and values; those of ``draft_options.toml`` are looked at, an option
            that is not given takes part in no combination. ``graph_mode`` has the values of
            :attr:`BackendRequest.graph_mode`.

    Returns:
        One refusal per combination, empty when there is none.
    """
    return [_refusal(entry, options) for entry in _combinations() if _holds(entry, options)]


def _holds(entry: Mapping[str, Any], options: Mapping[str, object]) -> bool:
    return all(
        term["option"] in options and options[term["option"]] in term["values"]
        for term in entry["terms"]
    )


def _refusal(entry: Mapping[str, Any], options: Mapping[str, object]) -> Refusal:
    names = [term["option"] for term in entry["terms"]]
    return Refusal(
        rule=f"draft_options.{entry['id']}",
        parameter=", ".join(names),
        found=", ".join(f"{name}={options[name]}" for name in names),
        allowed=f"one of them alone: {entry['why']}",
        source=entry["source"],
    )


@cache
def _combinations() -> Sequence[Mapping[str, Any]]:
    text = resources.files(__package__).joinpath("draft_options.toml").read_text("utf-8")
    found: Sequence[Mapping[str, Any]] = tomllib.loads(text)["combination"]
    return found


def agreed_step_count(wanted: int, group: DCPGroup) -> int:
    """How many draft steps every rank runs: the most that any of them wants.

    Draft steps contain collectives, so ranks that run different numbers of them wait for each other
    forever: a rank with a prefill or without requests must run as many as one that drafts k tokens,
    on dummy batches (:meth:`AttentionBatch.dummy`). Where k is fixed by the configuration that all
    ranks share, that number is the answer and no collective is needed; this is for numbers that
    ranks find by themselves.

    Args:
        wanted: Steps that this rank would run alone.
        group: All ranks that take part in the collectives of a draft step.

    Raises:
        InvalidFieldError: ``wanted`` is negative.
    """
    if wanted < 0:
        raise InvalidFieldError("wanted", wanted, "at least 0")
    return max(int(count) for count in group.all_gather(torch.tensor([wanted])))


@contextmanager
def config_unchanged(config: object, name: str = "config") -> Iterator[None]:
    """Require that a configuration object is the same after the context as before it.

    A draft's configuration is often made from parts of the target's. Editing such a part in place,
    for instance emptying the capture sizes for an eager draft, changes the target too. Put the
    making of the draft's configuration into this context.

    Args:
        config: The target's configuration: any tree of dataclasses, attrs classes, plain objects,
            mappings, sequences, sets and values. Properties are not called.
        name: What to call it in the error.

    Raises:
        ConfigChangedError: Something differs afterwards; names the first place, before and after.
            An exception of the context itself is not replaced.
    """
    before = _plain(config, ())
    yield
    change = _first_change(before, _plain(config, ()), name)
    if change is not None:
        raise ConfigChangedError(*change)


_VALUES = (
    str, bytes, int, float, complex, bool, type(None), enum.Enum, type, FunctionType, torch.dtype,
)  # fmt: skip


def _plain(value: object, above: tuple[int, ...]) -> Any:
    """A copy of a tree that no later edit can change."""
    if isinstance(value, _VALUES) or id(value) in above:
        return value
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value), value._version)
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return {key: _plain(item, above) for key, item in value.items()}
    if isinstance(value, Set):
        return frozenset(map(repr, value))
    if isinstance(value, Sequence):
        return [_plain(item, above) for item in value]
    fields = _fields(value)
    return value if fields is None else {k: _plain(item, above) for k, item in fields.items()}


def _fields(value: object) -> Mapping[str, object] | None:
    slotted = getattr(type(value), "__attrs_attrs__", None)
    if slotted is not None:
        return {field.name: getattr(value, field.name) for field in slotted}
    found: Mapping[str, object] | None = getattr(value, "__dict__", None)
    return found


def _first_change(before: Any, after: Any, path: str) -> tuple[str, object, object] | None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(key for key in after if key not in before)):
            change = _first_change(
                before.get(key, "nothing"), after.get(key, "nothing"), f"{path}.{key}"
            )
            if change is not None:
                return change
        return None
    same = type(before) is type(after) and bool(before == after)
    return None if same else (path, before, after)

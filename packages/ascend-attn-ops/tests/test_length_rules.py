"""Rules marked ``reads_lengths`` are the only ones that read the values of host integers.

Their verdict is asked for in every step, that of the others once for all steps of a shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_layers import arguments, layer

import ascend_attn_ops as ops
from ascend_attn_ops import arguments as records
from ascend_attn_ops import selection
from ascend_attn_ops.contract import Rule, RuleContext, Scope
from ascend_hwprofile import profile_for

OPERATORS = [op for op in ops.all_operators() if op.contract.length_rules]


class ValuesReadError(AssertionError):
    """Somebody looked at an integer of a list."""


class Sealed(tuple[int, ...]):
    """Integers that may be counted and not read."""

    def __iter__(self) -> Any:
        raise ValuesReadError

    def __getitem__(self, index: Any) -> Any:
        raise ValuesReadError


def sealed_samples(op: ops.Operator[Any]) -> Iterator[tuple[Any, Any]]:
    """Legal arguments of the operator with sealed lengths, and their profile."""
    names = [parameter.name for parameter in records.parameters(op.record)
             if parameter.kind == "ints"]  # fmt: skip
    for sample in op.samples():
        if sample.rules:
            continue
        args = ops.from_data(op.record, sample.data)
        for name in names:
            if getattr(args, name) is not None:
                object.__setattr__(args, name, Sealed(getattr(args, name)))
        yield args, None if sample.profile is None else profile_for(sample.profile)


def reads(rule: Rule, args: Any, context: RuleContext) -> bool:
    try:
        rule.predicate(args, context)
    except ValuesReadError:
        return True
    return False


def test_both_versions_of_the_attention_operator_say_which_rules_read_lengths() -> None:
    names = {op.name for op in OPERATORS}
    assert names == {"fused_infer_attention_score", "fused_infer_attention_score_v2"}


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_exactly_the_marked_rules_read_lengths(op: ops.Operator[Any]) -> None:
    found = set()
    for args, profile in sealed_samples(op):
        context = RuleContext(profile, op.contract.limits)
        judging = (r for r in op.contract.rules if r.scope not in (Scope.VALUE, Scope.FORMAT))
        found |= {rule.id for rule in judging if reads(rule, args, context)}
        for provider in op.providers.values():
            if provider.host:
                provider.gap(args)  # would raise
    marked = {rule.id for rule in op.contract.length_rules}
    assert found <= marked
    assert f"{op.name}.kv_lengths" in found
    assert f"{op.name}.query_lengths" in found


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators whose calls were judged by all rules."""
    names: list[str] = []
    original = selection._judge

    def watched(op: Any, *rest: Any, **more: Any) -> Any:
        names.append(op.name)
        return original(op, *rest, **more)

    monkeypatch.setattr(selection, "_judge", watched)
    return names


def call(lengths: tuple[int, ...], **changes: Any) -> torch.Tensor:
    """The operator on a batch of these lengths, with as many blocks as 300 keys need."""
    shared = arguments((300,) * len(lengths)) | {"actual_seq_lengths_kv": lengths} | changes
    out: torch.Tensor = ops.fused_infer_attention_score(**layer((300,) * len(lengths)), **shared)[0]
    return out


def test_a_further_step_is_judged_by_the_rules_about_lengths(judged: list[str]) -> None:
    selection._chosen_by_shape.clear()
    call((7, 9))
    first = len(judged)
    assert first > 0
    for keys in range(10, 20):
        call((7, keys))
    assert len(judged) == first
    call((7, 9, 11))
    assert len(judged) > first


@pytest.mark.parametrize(
    "wrong", [{"actual_seq_lengths_kv": (7, 999)}, {"actual_seq_lengths": (1, 3)}]
)
def test_wrong_lengths_of_a_further_step_are_refused(wrong: dict[str, Any]) -> None:
    call((7, 9))
    with pytest.raises(ops.OpArgumentError, match=next(iter(wrong))):
        call((7, 9), **wrong)

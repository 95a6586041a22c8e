"""Every rule of every operator is broken by a sample, and only where the sample says so."""

from __future__ import annotations

import pytest

import ascend_attn_ops as ops
from ascend_attn_ops.operator import Operator, Sample
from ascend_hwprofile import profile_for

SAMPLES = [(op, sample) for op in ops.all_operators() for sample in op.samples()]


def _profile(sample: Sample):
    return profile_for(sample.profile) if sample.profile else None


@pytest.mark.parametrize(
    ("op", "sample"), SAMPLES, ids=[f"{op.name}-{sample.name}" for op, sample in SAMPLES]
)
def test_sample_gets_its_verdict(op: Operator, sample: Sample) -> None:
    refusals = ops.check(op, sample.data, _profile(sample))
    found = {refusal.rule.removeprefix(f"{op.name}.") for refusal in refusals}
    assert set(sample.rules) <= found
    if not sample.rules:
        assert refusals == []
    for refusal in refusals:
        assert refusal.found
        assert refusal.allowed
        assert refusal.source


@pytest.mark.parametrize("op", list(ops.all_operators()), ids=lambda op: op.name)
def test_every_rule_has_a_sample_that_breaks_it(op: Operator) -> None:
    broken = {rule for sample in op.samples() for rule in sample.rules}
    rules = {
        rule.id.removeprefix(f"{op.name}.")
        for rule in op.contract.rules
        if rule.scope not in (ops.Scope.VALUE, ops.Scope.FORMAT)
    }
    assert broken >= rules

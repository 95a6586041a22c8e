"""The gate before the table, against a definition of it that is written apart from its data."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendFlashAttentionBackend,
    BackendRequest,
    judge_draft_gate,
    select_backend,
)
from ascend_attn_backends.selection import backend_classes
from ascend_hwprofile import profile_for

TAKEN = BackendRequest(
    role="draft",
    head_size=128,
    num_heads=32,
    num_kv_heads=8,
    dtype=torch.bfloat16,
    causal=False,
    speculative=True,
    runner="v1",
    draft_eager=True,
    target_model_type="glm_moe_dsa",
    draft_architecture="DFlash2DraftModel",
)
A5 = profile_for("A5")

# The twelve terms: seven conditions (the first is the product) and five exclusions.
CONDITIONS: dict[str, dict[str, Any]] = {
    "runner": {"runner": "v2"},
    "role": {"role": "target"},
    "draft_eager": {"draft_eager": False},
    "target_model_type": {"target_model_type": "deepseek_v32"},
    "draft_architecture": {"draft_architecture": "DFlashDraftModel"},
    "dtype": {"kv_cache_dtype": "int8"},
}
EXCLUSIONS: dict[str, dict[str, Any]] = {
    "sinks": {"has_sinks": True},
    "multimodal_prefix": {"has_multimodal_prefix": True},
    "per_head_quant_scales": {"per_head_quant_scales": True},
    "attn_type": {"attn_type": "encoder_only"},
    "batch_invariant": {"batch_invariant": True},
}
PRECONDITIONS: dict[str, dict[str, Any]] = {
    "mode": {"draft_flash_attn": "off"},
    "prefill_context_parallel": {"prefill_context_parallel_size": 2},
    "speculative": {"speculative": False},
}
LIMITS: dict[str, dict[str, Any]] = {
    "alibi": {"has_alibi": True},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "context_parallel": {"context_parallel_size": 2},
    "training_consistency": {"training_consistency": True},
}
BREAKABLE = CONDITIONS | EXCLUSIONS
PROFILES = ["A2", "A3", "A5", "310P"]
FLAGS = list(itertools.product([False, True], repeat=3))


def verdict_rules(request: BackendRequest, profile: str) -> list[str]:
    (verdict,) = [
        verdict
        for verdict in select_backend(request, profile_for(profile)).verdicts
        if verdict.backend == "draft_flash"
    ]
    return [refusal.rule.removeprefix("draft_flash.") for refusal in verdict.refusals]


def table_choice(request: BackendRequest, profile: str) -> str | None:
    """The first backend that takes the layer when nobody has heard of drafts."""
    for name, backend in backend_classes().items():
        if name != "draft_flash" and not backend.refusals(request, profile_for(profile)):
            return name
    return None


def with_flags(request: BackendRequest, flags: tuple[bool, bool, bool]) -> BackendRequest:
    names = ("use_mla", "use_sparse", "use_compress")
    return attrs.evolve(request, **dict(zip(names, flags, strict=True)))


def merged(terms: Any) -> dict[str, Any]:
    return {key: value for term in terms for key, value in BREAKABLE[term].items()}


def check(flags: tuple[bool, bool, bool], profile: str, broken: set[str]) -> None:
    request = with_flags(attrs.evolve(TAKEN, **merged(broken)), flags)
    selection = select_backend(request, profile_for(profile))
    expected = broken | ({"architecture"} if any(flags) else set())
    expected |= set() if profile == "A5" else {"device_length_flash_attn"}
    assert set(verdict_rules(request, profile)) == expected
    assert len(verdict_rules(request, profile)) == len(expected)
    assert selection.backend == ("draft_flash" if not expected else table_choice(request, profile))
    assert selection.relaxations == ()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("broken", ["", *BREAKABLE])
def test_matrix_each_term_alone(flags: tuple[bool, bool, bool], profile: str, broken: str) -> None:
    """The twelfth term, the product, is broken by three of the four profiles."""
    check(flags, profile, {broken} - {""})


@given(
    st.sampled_from(FLAGS), st.sampled_from(PROFILES), st.sets(st.sampled_from(sorted(BREAKABLE)))
)
def test_matrix_random_combinations(
    flags: tuple[bool, bool, bool], profile: str, broken: set[str]
) -> None:
    check(flags, profile, broken)


def test_the_draft_backend_is_asked_first() -> None:
    selection = select_backend(TAKEN, A5)
    assert selection.verdicts[0].backend == next(iter(backend_classes())) == "draft_flash"
    accepted = [verdict.backend for verdict in selection.verdicts if verdict.accepted]
    assert accepted == ["draft_flash", "standard"]
    assert selection.backend_class is AscendFlashAttentionBackend


def test_twelve_terms_and_no_other_conditions() -> None:
    terms = judge_draft_gate(TAKEN, A5)
    names = {kind: [t.rule.removeprefix("draft_flash.") for t in terms if t.kind == kind]
             for kind in ("precondition", "condition", "exclusion", "limit")}  # fmt: skip
    assert len(names["condition"]) == 7
    assert len(names["exclusion"]) == 5
    assert set(names["condition"]) == set(CONDITIONS) | {"device_length_flash_attn"}
    assert set(names["exclusion"]) == set(EXCLUSIONS)
    assert set(names["precondition"]) == set(PRECONDITIONS) | {"architecture"}
    assert set(names["limit"]) == set(LIMITS)
    assert all(term.state == "holds" and term.source and term.title for term in terms)


@pytest.mark.parametrize("term", PRECONDITIONS | LIMITS)
def test_preconditions_and_limits(term: str) -> None:
    request = attrs.evolve(TAKEN, **(PRECONDITIONS | LIMITS)[term])
    assert verdict_rules(request, "A5") == [term]
    assert select_backend(request, A5).backend == table_choice(request, "A5")


@pytest.mark.parametrize(
    ("term", "found", "allowed"),
    [
        ("runner", "v2", "v1"),
        ("role", "target", "draft"),
        ("draft_eager", "False", "True"),
        ("target_model_type", "deepseek_v32", "glm_moe_dsa"),
        ("draft_architecture", "DFlashDraftModel", "DFlash2DraftModel"),
        ("dtype", "bfloat16, int8", "float16 or bfloat16, with kv_cache_dtype auto or the same"),
        ("sinks", "True", "False"),
        ("attn_type", "encoder_only", "decoder"),
    ],
)
def test_reasons_are_exact(term: str, found: str, allowed: str) -> None:
    request = attrs.evolve(TAKEN, **BREAKABLE[term])
    (refusal,) = AscendFlashAttentionBackend.refusals(request, A5)
    assert (refusal.rule, refusal.found, refusal.allowed) == (f"draft_flash.{term}", found, allowed)


def test_dtypes() -> None:
    for change in ({"dtype": torch.float16}, {"kv_cache_dtype": "bfloat16"}):
        assert select_backend(attrs.evolve(TAKEN, **change), A5).backend == "draft_flash"
    for provider in (None, "cpu"):
        request = attrs.evolve(TAKEN, dtype=torch.float32, provider=provider)
        assert verdict_rules(request, "A5") == ["dtype"]


@pytest.mark.parametrize(
    ("change", "parameter"),
    [({"head_size": 96}, "q"), ({"block_size": 8}, "k"), ({"num_heads": 9}, "k")],
)
def test_a_layer_that_the_operator_refuses_falls_back(
    change: dict[str, Any], parameter: str
) -> None:
    request = attrs.evolve(TAKEN, **change)
    assert all(not term.broken for term in judge_draft_gate(request, A5))
    refusals = AscendFlashAttentionBackend.refusals(request, A5)
    assert {refusal.rule.split(".")[0] for refusal in refusals} == {"flash_attn"}
    assert parameter in {refusal.parameter for refusal in refusals}
    assert select_backend(request, A5).backend == table_choice(request, "A5")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("mode", ["strict", "wide", "off"])
def test_the_targets_choice_does_not_depend_on_a_draft(
    flags: tuple[bool, bool, bool], profile: str, mode: str
) -> None:
    with_draft = attrs.evolve(with_flags(TAKEN, flags), role="target", draft_flash_attn=mode)
    without = attrs.evolve(
        with_draft, speculative=False, draft_eager=False, draft_architecture=None
    )
    choices = [select_backend(request, profile_for(profile)) for request in (with_draft, without)]
    assert choices[0].backend == choices[1].backend == table_choice(without, profile)
    others = [[v for v in choice.verdicts if v.backend != "draft_flash"] for choice in choices]
    assert others[0] == others[1]


TABLE = {
    (False, False, False): "standard",
    (True, False, False): "mla",
    (True, True, False): "sfa",
    (True, False, True): "dsa",
    (True, True, True): "dsa",
}
"""Flags to backend; 310P has only the first, and only where it is simulated."""
LATENT = {"head_size": 576, "num_kv_heads": 1, "num_heads": 64}
COMPRESSED = {"head_size": 512, "compress_ratio": 4, "compressed_top_k": 512}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("flags", FLAGS)
def test_the_table(flags: tuple[bool, bool, bool], profile: str, role: str) -> None:
    """What each architecture gets when the gate is closed, written out."""
    request = with_flags(attrs.evolve(TAKEN, role=role, causal=True, draft_eager=False), flags)
    if any(flags):
        request = attrs.evolve(request, **LATENT)
    if flags[2]:
        request = attrs.evolve(request, **COMPRESSED)
    if profile == "310P":
        request = attrs.evolve(request, dtype=torch.float16, provider="cpu")
    expected = TABLE.get(flags)
    without = {"310P": set(TABLE.values()) - {"standard"}, "A2": {"dsa"}}  # A2 has no compressor
    if expected in without.get(profile, ()):
        expected = None
    selection = select_backend(request, profile_for(profile))
    assert selection.backend == expected


RELAXED: dict[str, dict[str, Any]] = {
    "runner": {"runner": "v2"},
    "target_model_type": {"target_model_type": "qwen3"},
    "draft_architecture": {"draft_architecture": "DFlashDraftModel"},
}


@pytest.mark.parametrize("terms", [c for n in range(4) for c in itertools.combinations(RELAXED, n)])
def test_wide_takes_more_and_names_every_relaxation(terms: tuple[str, ...]) -> None:
    changes = {key: value for term in terms for key, value in RELAXED[term].items()}
    wide = attrs.evolve(TAKEN, **changes, draft_flash_attn="wide")
    selection = select_backend(wide, A5)
    assert selection.backend == "draft_flash"
    assert [term.rule for term in selection.relaxations] == [f"draft_flash.{t}" for t in terms]
    for term in selection.relaxations:
        assert f"relaxed: {term.refusal()}" in selection.as_text()
        assert term.refusal().as_dict() in selection.as_dict()["relaxations"]
    strict = select_backend(attrs.evolve(TAKEN, **changes), A5)
    assert (strict.backend == "draft_flash") == (not terms)


@pytest.mark.parametrize("term", sorted(set(BREAKABLE) - set(RELAXED)))
def test_wide_keeps_every_other_term(term: str) -> None:
    request = attrs.evolve(TAKEN, **BREAKABLE[term], runner="v2", draft_flash_attn="wide")
    assert verdict_rules(request, "A5") == [term]
    assert select_backend(request, A5).backend == table_choice(request, "A5")
    assert select_backend(request, A5).relaxations == ()


def test_wide_needs_a_draft_of_the_family() -> None:
    request = attrs.evolve(
        TAKEN, draft_architecture="Eagle3LlamaForCausalLM", draft_flash_attn="wide"
    )
    (refusal,) = AscendFlashAttentionBackend.refusals(request, A5)
    assert refusal.allowed.startswith("DFlash2DraftModel or DFlashDraftModel")


@pytest.mark.parametrize("change", [{"runner": "v3"}, {"draft_flash_attn": "maybe"}])
def test_unknown_words_are_named(change: dict[str, str]) -> None:
    (field,) = change
    with pytest.raises(ValueError, match=field):
        attrs.evolve(TAKEN, **change)

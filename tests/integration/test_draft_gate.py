"""The draft gate through vLLM's own `get_attn_backend`: all terms true, and each broken alone.

Configurations are real ones of vLLM, made without weights; the draft's is the one that vLLM's own
drafter derives. See `gate_probe.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from draft_models import (
    DFLASH,
    DFLASH2,
    draft_config,
    make_glm_config,
    make_qwen3_config,
    write_config,
)
from engines import REPOSITORY, environment, run_script

pytestmark = pytest.mark.engine

OFF = {"additional_config": {"ascend": {"draft_flash_attn": "off"}}}
WIDE = {"additional_config": {"ascend": {"draft_flash_attn": "wide"}}}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

TERMS: dict[str, dict[str, Any]] = {
    "draft_flash.device_length_flash_attn": {"environment": {"ASCEND_HWPROFILE": "A3"}},
    "draft_flash.runner": {"environment": V2},
    "draft_flash.role": {"as_target": True},
    "draft_flash.draft_eager": {"engine": {"enforce_eager": False}},
    "draft_flash.target_model_type": {"target": "qwen3"},
    "draft_flash.draft_architecture": {"draft": "dflash"},
    "draft_flash.dtype": {"engine": {"dtype": "float32"}},
    "draft_flash.sinks": {"question": {"has_sink": True}},
    "draft_flash.multimodal_prefix": {"question": {"use_mm_prefix": True}},
    "draft_flash.per_head_quant_scales": {"question": {"use_per_head_quant_scales": True}},
    "draft_flash.attn_type": {"question": {"attn_type": "encoder_only"}},
    "draft_flash.batch_invariant": {"environment": {"VLLM_BATCH_INVARIANT": "1"}},
}
"""Seven conditions and five exclusions -> what breaks it, and nothing else of the gate."""

FALLS_BACK = {
    "draft_flash.device_length_flash_attn": "StandardBackend",
    "draft_flash.runner": "StandardBackend",
    "draft_flash.role": "StandardBackend",
    "draft_flash.draft_eager": "StandardBackend",
    "draft_flash.target_model_type": "StandardBackend",
    "draft_flash.draft_architecture": "StandardBackend",
    "draft_flash.dtype": "StandardBackend",
    "draft_flash.per_head_quant_scales": "StandardBackend",
}
"""Term -> what the table gives where it is broken."""
REFUSED = {
    "draft_flash.sinks": "standard.has_sinks",
    "draft_flash.multimodal_prefix": "standard.has_multimodal_prefix",
    "draft_flash.attn_type": "standard.attn_type",
    "draft_flash.batch_invariant": "vllm.use_batch_invariant",
}
"""Exclusions where the table has nobody either -> why the backend behind the gate does not take the
same thing. The plugin's README names them."""

TARGETS = {
    **dict.fromkeys(TERMS, "SFABackend"),
    "draft_flash.target_model_type": "StandardBackend",
    "draft_flash.batch_invariant": "none",  # refused by the table, with and without a draft
}
"""Term -> the class that the target gets."""

QUANTISED_DRAFT = {"speculative": {"kv_cache_dtype": "fp8"}}
CAUSAL = {"target": "qwen3", "draft": "causal dflash", "engine": WIDE}
"""A target and a draft that ask the same question: same head size, both causal."""

FURTHER: dict[str, dict[str, Any]] = {
    "all": {},
    "quantised cache of the draft": QUANTISED_DRAFT,
    "scales per head of a quantised cache": {
        **QUANTISED_DRAFT,
        "question": {"use_per_head_quant_scales": True},
    },
    "the draft alone is eager": {
        "engine": {"enforce_eager": False},
        "speculative": {"enforce_eager": True},
    },
    "wide": {"target": "qwen3", "draft": "dflash", "environment": V2, "engine": WIDE},
    "wide on A2": {"engine": WIDE, "environment": {"ASCEND_HWPROFILE": "A2"}},
    "same question": CAUSAL,
    "same question, unmarked": {**CAUSAL, "fault": "no mark"},
    "the user names our backend for the target": {
        **CAUSAL,
        "engine": {
            **WIDE,
            "attention_config": {
                "backend": "CUSTOM",
                "backend_per_kind": {"full_attention": "CUSTOM"},
            },
        },
    },
    "the user chose for the draft": {
        **CAUSAL,
        "speculative": {"attention_backend": "CPU_ATTN"},
    },
}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": (
        {"target": "qwen3", "draft": "other vocabulary"},
        "vocab_size: found 600; allowed: 512, as the target has",
    ),
    "k": (
        {"speculative": {"num_speculative_tokens": 8}},
        "num_speculative_tokens: found 8; allowed: at most 7: the draft's block_size is 8",
    ),
    "state space": (
        {"target": "mamba"},
        "MambaForCausalLM, with layers of linear attention or state space;",
    ),
    "option": (
        {"engine": {"additional_config": {"ascend": {"draft_flash": "wide"}}}},
        "option ascend.draft_flash of --additional-config is 'wide': allowed is one of: ",
    ),
    "value of an option": (
        {"engine": {"additional_config": {"ascend": {"draft_flash_attn": "on"}}}},
        "option ascend.draft_flash_attn of --additional-config is 'on': "
        "allowed is one of: strict, wide, off",
    ),
}
"""Input that vLLM stops at with a message of ours, and the message."""

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "vocab_size": 512,
    "hidden_size": 64,
    "state_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}


def cases(folder: Path) -> list[dict[str, Any]]:
    """Every case, and each broken term again with the gate switched off."""
    targets = {
        "glm": make_glm_config(folder / "glm"),
        "qwen3": make_qwen3_config(folder / "qwen3"),
        "mamba": write_config(folder / "mamba", MAMBA),
    }
    drafts = {
        "dflash": write_config(folder / "dflash", draft_config(DFLASH, [0, 1])),
        "dflash2": write_config(folder / "dflash2", draft_config(DFLASH2, [0, 1])),
        "causal dflash": write_config(
            folder / "causal", draft_config(DFLASH, [0, 1], is_causal=True)
        ),
        "other vocabulary": write_config(
            folder / "other", draft_config(DFLASH, [0, 1], vocab_size=600)
        ),
    }
    wanted = {**TERMS, **FURTHER, **{name: changes for name, (changes, _) in BAD.items()}}
    for rule, changes in TERMS.items():
        wanted[f"{rule} off"] = {**changes, "engine": {**changes.get("engine", {}), **OFF}}
    return [
        {
            **changes,
            "name": name,
            "target": str(targets[changes.get("target", "glm")]),
            "draft": str(drafts[changes.get("draft", "dflash2")]),
            # V1 unless a case says otherwise: the process itself was started for both runners.
            "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0", **changes.get("environment", {})},
        }
        for name, changes in wanted.items()
    ]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gate")
    job = {"cases": cases(folder)}
    return dict(run_script("gate_probe.py", job, folder, environment(True, **V2))[0])


def outcome(answer: dict[str, Any]) -> str:
    """The class that vLLM was told to use, or that it was told none."""
    return str(answer.get("class", "none"))


def test_when_all_holds_the_draft_gets_the_draft_backend(answers: dict[str, Any]) -> None:
    found = answers["all"]
    assert found["draft"]["class"] == "DraftFlashBackend"
    assert found["draft"]["reasons"]["draft_flash"] == found["draft"]["relaxed"] == []
    assert found["target"]["class"] == "SFABackend"


def refusals(error: str) -> dict[str, list[str]]:
    """Backend -> the rules by which it refuses, as the message lists them; ours comes last."""
    found: dict[str, list[str]] = {}
    for line in error.splitlines():
        if named := re.match(r"  ([\w-]+)(?=:|\s+(?:refused|chosen)$)", line):
            backend = named[1]
        if rule := re.search(r"\[([\w.]+);", line):
            found.setdefault(backend, []).append(rule[1])
    return found


@pytest.mark.parametrize("rule", FALLS_BACK)
def test_a_term_broken_alone_falls_back_to_the_table(rule: str, answers: dict[str, Any]) -> None:
    broken, off = answers[rule]["draft"], answers[f"{rule} off"]["draft"]
    assert broken["class"] == off["class"] == FALLS_BACK[rule]
    assert broken["reasons"]["draft_flash"] == [rule]
    assert broken["reasons"]["standard"] == []


@pytest.mark.parametrize("rule", REFUSED)
def test_an_exclusion_that_the_table_refuses_too_stops_the_start(
    rule: str, answers: dict[str, Any]
) -> None:
    """With the gate switched off for the same reason: the gate itself refuses nothing."""
    broken = refusals(answers[rule]["draft"]["error"])
    off = refusals(answers[f"{rule} off"]["draft"]["error"])
    behind = "ascend-vllm-plugin" if REFUSED[rule].startswith("vllm.") else "standard"
    assert broken["draft_flash"] == [rule]
    assert broken[behind] == off[behind] == [REFUSED[rule]]
    assert off["draft_flash"] == ["draft_flash.mode", rule]


def test_it_is_known_what_follows_from_every_term() -> None:
    assert {**FALLS_BACK, **REFUSED}.keys() == TERMS.keys()
    assert len(FALLS_BACK) + len(REFUSED) == 7 + 5
    readme = (REPOSITORY / "packages" / "ascend-vllm-plugin" / "README.md").read_text("utf-8")
    assert [rule for rule in REFUSED.values() if f"`{rule}`" not in readme] == []


@pytest.mark.parametrize("rule", TERMS)
def test_the_target_is_what_it_is_without_a_draft(rule: str, answers: dict[str, Any]) -> None:
    found = answers[rule]
    assert outcome(found["target"]) == outcome(found["alone"]) == TARGETS[rule]
    if TARGETS[rule] == "none":
        for answer in (found["target"], found["alone"]):
            assert refusals(answer["error"])["ascend-vllm-plugin"] == [REFUSED[rule]]


def test_switched_off_the_reason_is_the_mode(answers: dict[str, Any]) -> None:
    reasons = answers["draft_flash.runner off"]["draft"]["reasons"]["draft_flash"]
    assert reasons == ["draft_flash.mode", "draft_flash.runner"]


@pytest.mark.parametrize(
    ("case", "terms"),
    [
        ("quantised cache of the draft", ["draft_flash.dtype"]),
        (
            "scales per head of a quantised cache",
            ["draft_flash.dtype", "draft_flash.per_head_quant_scales"],
        ),
    ],
)
def test_a_quantised_cache_of_the_draft_is_refused(
    case: str, terms: list[str], answers: dict[str, Any]
) -> None:
    found = answers[case]
    said = refusals(found["draft"]["error"])
    assert said["draft_flash"] == terms
    assert said["standard"] == ["standard.kv_cache_dtype"]
    assert found["target"] == answers["all"]["target"]


def test_a_draft_may_be_eager_on_its_own(answers: dict[str, Any]) -> None:
    assert answers["the draft alone is eager"]["draft"]["class"] == "DraftFlashBackend"


def test_the_wide_gate_names_what_it_sets_aside(answers: dict[str, Any]) -> None:
    assert answers["wide"]["draft"]["class"] == "DraftFlashBackend"
    assert answers["wide"]["draft"]["relaxed"] == [
        "draft_flash.runner",
        "draft_flash.target_model_type",
        "draft_flash.draft_architecture",
    ]
    assert answers["wide on A2"]["draft"]["class"] == "StandardBackend"


def test_target_and_draft_with_one_question_get_their_own_answers(answers: dict[str, Any]) -> None:
    found = answers["same question"]
    assert found["target"]["class"] == "StandardBackend"
    assert found["draft"]["class"] == "DraftFlashBackend"
    assert found["backends"]["draft"] == found["backends"]["of the draft"] == "CUSTOM"
    assert found["backends"]["target"] is None


def test_the_mark_is_still_needed(answers: dict[str, Any]) -> None:
    """When this fails, vLLM tells target and draft apart: drop `mark_drafts`."""
    found = answers["same question, unmarked"]
    assert found["draft"]["class"] == found["target"]["class"] == "StandardBackend"
    assert found["backends"]["of the draft"] is None


def test_naming_our_backend_for_the_target_does_not_make_it_a_draft(
    answers: dict[str, Any],
) -> None:
    found = answers["the user names our backend for the target"]
    assert found["target"] == answers["same question"]["target"]
    assert found["draft"] == answers["same question"]["draft"]
    assert found["backends"] == answers["same question"]["backends"]


def test_the_users_backend_for_the_draft_stays(answers: dict[str, Any]) -> None:
    found = answers["the user chose for the draft"]
    assert found["draft"] == {
        "class": "CPUAttentionBackend",
        "chosen by": "speculative_config.attention_backend",
    }
    assert found["target"] == answers["same question"]["target"]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_stops_vllm_before_weights_load(case: str, answers: dict[str, Any]) -> None:
    """None of the folders holds weights."""
    assert BAD[case][1] in answers[case]["error"]

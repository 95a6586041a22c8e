from __future__ import annotations

import itertools
import json

import attrs
import pytest
import torch

from ascend_attn_backends import (
    AscendAttentionBackend,
    BackendRequest,
    NoBackendError,
    Selection,
    get_attn_backend_cls,
    select_backend,
)
from ascend_attn_backends.selection import backend_classes
from ascend_attn_ops import Refusal
from ascend_hwprofile import Family, HardwareProfile, profile_for

PLAIN = BackendRequest(head_size=128, num_heads=32, num_kv_heads=8, dtype=torch.bfloat16)
PROFILES = ["A2", "A3", "A5"]


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> HardwareProfile:
    return profile_for(request.param)


def rules(request: BackendRequest, profile: HardwareProfile) -> set[str]:
    return {entry.rule for entry in AscendAttentionBackend.refusals(request, profile)}


def of_standard(selection: Selection) -> tuple[Refusal, ...]:
    (verdict,) = [verdict for verdict in selection.verdicts if verdict.backend == "standard"]
    return verdict.refusals


def test_plain_attention_goes_to_standard(profile: HardwareProfile) -> None:
    selection = select_backend(PLAIN, profile)
    assert selection.backend == selection.architecture == "standard"
    assert selection.backend_class is AscendAttentionBackend
    accepted = [verdict.backend for verdict in selection.verdicts if verdict.accepted]
    assert accepted == ["standard"]
    assert selection.architecture_refusals == ()


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},
        {"causal": False},
        {"role": "draft"},
        {"block_size": 16},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"num_heads": 8, "num_kv_heads": 8},
    ],
)
def test_what_standard_takes(change: dict[str, object], profile: HardwareProfile) -> None:
    assert rules(attrs.evolve(PLAIN, **change), profile) == set()


REFUSED = {
    "standard.use_mla": ({"use_mla": True}, "True", "False"),
    "standard.use_sparse": ({"use_sparse": True}, "True", "False"),
    "standard.use_compress": ({"use_compress": True}, "True", "False"),
    "standard.attn_type": ({"attn_type": "encoder_only"}, "encoder_only", "decoder"),
    "standard.has_sinks": ({"has_sinks": True}, "True", "False"),
    "standard.has_multimodal_prefix": ({"has_multimodal_prefix": True}, "True", "False"),
    "standard.has_alibi": ({"has_alibi": True}, "True", "False"),
    "standard.logits_soft_cap": ({"logits_soft_cap": 30.0}, "30.0", "None"),
    "standard.context_parallel_size": ({"context_parallel_size": 2}, "2", "1"),
    "standard.kv_cache_dtype": ({"kv_cache_dtype": "int8"}, "int8", "auto or bfloat16"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_standard_refuses(rule: str, profile: HardwareProfile) -> None:
    change, found, allowed = REFUSED[rule]
    selection = select_backend(attrs.evolve(PLAIN, **change), profile)
    assert selection.backend == ("standard_dcp" if "context_parallel_size" in change else None)
    (refusal,) = of_standard(selection)
    assert refusal.rule == rule
    assert refusal.parameter == rule.split(".")[1]
    assert refusal.found == found
    assert refusal.allowed.startswith(allowed)
    assert refusal.source


def test_every_reason_is_given_at_once(profile: HardwareProfile) -> None:
    request = attrs.evolve(PLAIN, use_mla=True, has_sinks=True, logits_soft_cap=1.0)
    assert rules(request, profile) == {
        "standard.use_mla",
        "standard.has_sinks",
        "standard.logits_soft_cap",
    }


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"num_heads": 256, "num_kv_heads": 1}, "num_key_value_heads"),
        ({"num_heads": 9}, "num_key_value_heads"),
        ({"block_size": 24}, "block_size"),
        ({"head_size": 80}, "query"),
        ({"dtype": torch.float32}, "query"),
    ],
)
def test_limits_come_from_the_operator_contracts(change: dict[str, object], parameter: str) -> None:
    """On A2: A5 takes more of these, as the operator's contract says."""
    refusals = AscendAttentionBackend.refusals(attrs.evolve(PLAIN, **change), profile_for("A2"))
    assert parameter in {entry.parameter for entry in refusals}
    assert {entry.rule.split(".")[0] for entry in refusals} == {"fused_infer_attention_score"}


def test_float32_is_taken_where_the_product_is_simulated(profile: HardwareProfile) -> None:
    request = attrs.evolve(PLAIN, dtype=torch.float32)
    assert select_backend(request, profile).backend is None
    simulated = attrs.evolve(request, provider="cpu")
    assert select_backend(simulated, profile).backend == "standard"


ARCHITECTURES = {
    (False, False, False): "standard",
    (True, False, False): "mla",
    (True, True, False): "sfa",
    (True, False, True): "dsa",
    (True, True, True): "dsa",
}
FLAGS = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize("flags", FLAGS)
def test_table(flags: tuple[bool, bool, bool], profile: HardwareProfile) -> None:
    names = ("use_mla", "use_sparse", "use_compress")
    selection = select_backend(attrs.evolve(PLAIN, **dict(zip(names, flags, strict=True))), profile)
    assert selection.architecture == ARCHITECTURES.get(flags)
    broken = {f"standard.{name}" for name, flag in zip(names, flags, strict=True) if flag}
    found = {entry.rule for entry in of_standard(selection)}
    assert {rule for rule in found if rule.split(".")[1] in names} == broken
    known = {entry.rule for entry in selection.architecture_refusals}
    architecture = ARCHITECTURES.get(flags)
    assert ("table.architecture" in known) == (architecture is None)
    if architecture is not None:
        assert get_attn_backend_cls(*flags).name == architecture
    else:
        with pytest.raises(NoBackendError, match="use_mla"):
            get_attn_backend_cls(*flags)


def test_no_backend_is_one_error_with_every_reason() -> None:
    request = attrs.evolve(PLAIN, use_sparse=True)
    selection = select_backend(request, profile_for("A5"))
    with pytest.raises(NoBackendError) as raised:
        _ = selection.backend_class
    for words in ("no backend", "standard.use_sparse", "found True", "table.architecture", "dsa"):
        assert words in str(raised.value)


class Test310P:
    profile = profile_for(Family.ATLAS_310P)

    @pytest.mark.parametrize(
        "flags", [(True, False, False), (True, True, False), (True, True, True)]
    )
    def test_says_why_it_has_nothing_else(self, flags: tuple[bool, bool, bool]) -> None:
        request = attrs.evolve(
            PLAIN, use_mla=flags[0], use_sparse=flags[1], use_compress=flags[2], provider="cpu"
        )
        refusals = select_backend(request, self.profile).architecture_refusals
        (capability,) = [entry for entry in refusals if entry.rule == "table.capability"]
        assert capability.parameter == "profile"
        assert len(capability.found) > 20

    def test_standard_is_simulated(self) -> None:
        request = attrs.evolve(PLAIN, dtype=torch.float16, provider="cpu")
        assert select_backend(request, self.profile).backend == "standard"

    def test_its_own_operators_are_missing_and_that_is_said(self) -> None:
        request = attrs.evolve(PLAIN, dtype=torch.float16)
        selection = select_backend(request, self.profile)
        assert selection.backend is None
        (refusal,) = of_standard(selection)
        assert refusal.parameter == "profile"
        assert "310P" in refusal.found


def test_text() -> None:
    text = select_backend(PLAIN, profile_for("A5")).as_text().splitlines()
    assert text[0].startswith("target layer, standard, on Ascend950")
    assert text[0].endswith(": standard")
    assert ["standard", "chosen"] in [line.split() for line in text]
    refused = select_backend(attrs.evolve(PLAIN, has_sinks=True), profile_for("A5")).as_text()
    assert "standard refused" in " ".join(refused.split())
    assert "has_sinks: found True; allowed: False [standard.has_sinks" in refused


def test_dict_is_json() -> None:
    request = attrs.evolve(PLAIN, role="draft", use_mla=True)
    data = json.loads(json.dumps(select_backend(request, profile_for("A5")).as_dict()))
    assert data["role"] == "draft"
    assert data["kind"] == "mla"
    assert data["backend"] is None
    assert [entry["backend"] for entry in data["verdicts"]] == list(backend_classes())
    verdict = data["verdicts"][0]
    assert {"rule", "parameter", "found", "allowed", "source"} <= verdict["refusals"][0].keys()


@pytest.mark.parametrize(
    "change",
    [
        {"role": "judge"},
        {"head_size": 0},
        {"num_heads": 0},
        {"block_size": 0},
        {"sliding_window": 0},
    ],
)
def test_impossible_requests_are_named(change: dict[str, object]) -> None:
    (field,) = change
    with pytest.raises(ValueError, match=field):
        attrs.evolve(PLAIN, **change)

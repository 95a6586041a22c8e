from __future__ import annotations

import attrs
import pytest

from ascend_hwprofile import (
    Capability,
    Confidence,
    Family,
    HwProfileError,
    UnknownFigureError,
    UnknownOperatorError,
    UnknownSocError,
    UnsupportedSocError,
    known_profiles,
    operator_names,
    parse_soc_name,
    profile_for,
    profile_from_environment,
)

SUPPORTED = [family for family in Family if family is not Family.GEN1]
VERDICTS = {"y": True, "n": False, "?": None}


@pytest.mark.parametrize(
    ("family", "soc_name"),
    [
        ("A2", "Ascend910B1"),
        ("A3", "Ascend910_9391"),
        ("A5", "Ascend950PR_9599"),
        ("310P", "Ascend310P3"),
        ("310B", "Ascend310B4"),
    ],
)
def test_default_soc_of_a_family(family: str, soc_name: str) -> None:
    profile = profile_for(family)
    assert profile.soc_name == soc_name
    assert profile_for(Family(family)) is profile
    assert profile_for(f" {family.lower()} ") is profile
    assert profile_for(soc_name) is profile
    assert profile_for(parse_soc_name(soc_name)) is profile


def test_gen1_family_is_refused() -> None:
    with pytest.raises(UnsupportedSocError, match="first generation"):
        profile_for(Family.GEN1)


@pytest.mark.parametrize("wrong", [999, -1, True, None, 2.5, [], b"A2"])
def test_unknown_input(wrong: object) -> None:
    with pytest.raises(UnknownSocError):
        profile_for(wrong)  # type: ignore[arg-type]  # on purpose


def test_unknown_value_lists_the_known_ones() -> None:
    known = r"100\.\.104, 200\.\.205, 220\.\.225, 240\.\.243, 250\.\.256, 260"
    with pytest.raises(UnknownSocError, match=known):
        profile_for(226)


def test_a_value_may_be_text() -> None:
    assert profile_for("225") is profile_for(" 225 ") is profile_for(225)
    with pytest.raises(UnknownSocError, match="226: no SoC has this runtime value"):
        profile_for("226")


def test_device_length_flash_attn_is_a5_only() -> None:
    for profile in known_profiles():
        has = profile.supports(Capability.DEVICE_LENGTH_FLASH_ATTN)
        assert has == (profile.family is Family.A5), profile.soc_name
    why = profile_for("910B3").why_not(Capability.DEVICE_LENGTH_FLASH_ATTN)
    assert why is not None
    for part in ("Ascend910B3", "A2", "flash_attn", "Ascend950PR", "vendor"):
        assert part in why


def test_310p_has_neither_mla_nor_sparse_attention() -> None:
    profile = profile_for("310P")
    for capability in (Capability.MLA, Capability.SPARSE_FLASH_ATTENTION, Capability.DSA):
        assert not profile.supports(capability)
        assert "310P" in (profile.why_not(capability) or "")
    assert profile.supports(Capability.PAGED_ATTENTION)
    assert not profile.supports(Capability.BFLOAT16)


def test_compressor_keeps_dsa_from_a2() -> None:
    assert "compressor" in (profile_for("A2").why_not(Capability.DSA) or "")
    assert profile_for("A3").supports(Capability.DSA)


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_capability_holds_or_has_a_reason(family: Family) -> None:
    profile = profile_for(family)
    for capability in Capability:
        why = profile.why_not(capability)
        assert profile.supports(capability) == (why is None)
        assert (capability in profile.capabilities) == (why is None)
        if why is not None:
            assert capability.name in why
            assert profile.missing[capability]


@pytest.mark.parametrize("ask", ["supports", "why_not"])
def test_unknown_capability(ask: str) -> None:
    with pytest.raises(HwProfileError, match="unknown capability 'flash'; allowed: device_length"):
        getattr(profile_for("A2"), ask)("flash")


@pytest.mark.parametrize(
    ("product", "soc_name"),
    [
        ("A2", "Ascend910B3"),
        ("A3", "Ascend910_9391"),
        ("950PR", "Ascend950PR_9599"),
        ("950DT", "Ascend950DT_9582"),
        ("310P", "Ascend310P3"),
    ],
)
def test_operator_support(operators_row: dict[str, str], product: str, soc_name: str) -> None:
    support = profile_for(soc_name).operator(operators_row["operator"])
    assert support.supported is VERDICTS[operators_row[product]]
    assert support.source
    if support.supported is not True:
        assert support.reason
    if support.supported is None:
        assert support.confidence is Confidence.UNVERIFIED


def test_operators_of_an_unstated_950_product() -> None:
    profile = profile_for("Ascend950")
    assert profile.operator("flash_attn").supported is True
    merged = profile.operator("attention_update")
    assert merged.supported is None
    assert "950PR unknown, 950DT yes" in merged.reason


def test_unknown_operator_gives_the_nearest() -> None:
    with pytest.raises(UnknownOperatorError, match="'flash_atn'") as caught:
        profile_for("A5").operator("flash_atn")
    assert "flash_attn" in caught.value.nearest
    assert "flash_attn" in operator_names()


def test_require() -> None:
    assert profile_for("A5").require("cube_cores") == 36
    with pytest.raises(UnknownFigureError, match="memory_bytes of Ascend950PR_9599"):
        profile_for("A5").require("memory_bytes")
    with pytest.raises(UnknownFigureError, match="core counts are not"):
        profile_for(260).require("cube_cores")
    with pytest.raises(UnknownFigureError, match="no source read states it"):
        profile_for("310P3").require("no_such_figure")


def test_peak_of_a_dtype_that_is_not_computed() -> None:
    with pytest.raises(HwProfileError, match="'float8_e4m3' has no cube rate on Ascend910B1"):
        profile_for("A2").peak_tflops("float8_e4m3")
    assert profile_for("910_9372").peak_tflops("float16") is None


def test_profiles_are_frozen_hashable_and_distinct() -> None:
    profiles = known_profiles()
    assert len(set(profiles)) == len(profiles) > 40
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        profiles[0].cube_cores = 1  # type: ignore[misc]  # on purpose


def test_slice_has_no_figures_of_the_whole_chip() -> None:
    profile = profile_for("310p3vir02")
    assert profile.cube_cores == 2
    assert (profile.vector_cores, profile.memory_bytes, profile.l2_bytes) == (None, None, None)
    assert profile.clock_mhz == 1060


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_from_environment() is None
    monkeypatch.setenv("ASCEND_HWPROFILE", " ")
    assert profile_from_environment() is None
    monkeypatch.setenv("ASCEND_HWPROFILE", "a3")
    assert profile_from_environment() is profile_for("A3")
    monkeypatch.setenv("ASCEND_HWPROFILE", "910B33")
    with pytest.raises(UnknownSocError, match=r"ASCEND_HWPROFILE.*nearest.*Ascend910B3"):
        profile_from_environment()
    monkeypatch.setenv("ASCEND_HWPROFILE", "910B")
    with pytest.raises(UnsupportedSocError, match=r"ASCEND_HWPROFILE.*first generation"):
        profile_from_environment()


@pytest.mark.parametrize(
    ("soc", "slices"),
    [
        ("A2", (2, 3, 6, 12, 24)),
        ("Ascend950PR_9589", (4, 8, 16, 32)),
        ("Ascend950DT_9572", (7, 14, 28)),
        ("A3", ()),
    ],
)
def test_virtual_slices(soc: str, slices: tuple[int, ...]) -> None:
    assert profile_for(soc).virtual_slices == slices


@pytest.mark.parametrize(
    ("family", "core", "die_pair"),
    [
        ("A2", "dav-c220", False),
        ("A3", "dav-c220", True),
        ("A5", "dav-c310", False),
        ("310P", "dav-m200", False),
        ("310B", "dav-m300", False),
    ],
)
def test_toolchain_core_and_die_pair(family: str, core: str, die_pair: bool) -> None:
    profile = profile_for(family)
    assert (profile.toolchain_core, profile.die_pair) == (core, die_pair)

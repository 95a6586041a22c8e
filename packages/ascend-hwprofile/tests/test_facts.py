"""Every name, value and figure of the public sources resolves as they state it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ascend_hwprofile import (
    Confidence,
    Family,
    HardwareProfile,
    UnsupportedSocError,
    known_socs,
    parse_soc_name,
    profile_for,
)

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9}
COLUMNS = {
    "cube": "cube_cores",
    "vector": "vector_cores",
    "ai_cpus": "ai_cpus",
    "clock_mhz": "clock_mhz",
    "memory": "memory_bytes",
    "l2": "l2_bytes",
}


def number(cell: str) -> int | None:
    if cell == "?":
        return None
    count, _, unit = cell.partition(" ")
    return int(count) * UNITS.get(unit, 1)


def value(profile: HardwareProfile, name: str) -> int | float | None:
    figure = profile.figure(name)
    return None if figure is None else figure.value


def test_name_is_identified(socs_row: dict[str, str]) -> None:
    soc = parse_soc_name(socs_row["text"])
    assert soc.soc_name == socs_row["soc_name"]
    assert (soc.family or "") == socs_row["family"]
    assert str(soc.runtime_value or "") == socs_row["runtime_value"]
    assert (soc.refusal is not None) == (socs_row["verdict"] == "refused")


def test_figures_of_the_soc(socs_row: dict[str, str]) -> None:
    if socs_row["verdict"] == "refused":
        with pytest.raises(UnsupportedSocError, match=socs_row["soc_name"]):
            profile_for(socs_row["text"])
        return
    profile = profile_for(socs_row["text"])
    assert profile.npu_arch == int(socs_row["npu_arch"])
    stated = {name: number(socs_row[column]) for column, name in COLUMNS.items()}
    assert {name: value(profile, name) for name in stated} == stated
    for name in ("cube_cores", "vector_cores", "clock_mhz", "memory_bytes", "l2_bytes"):
        assert getattr(profile, name) == stated[name]
    if profile.cube_cores is not None:
        assert profile.figures["cube_cores"].confidence == socs_row["figure_confidence"]


def test_doubts_of_a_figure(figures_row: dict[str, str]) -> None:
    figure = profile_for(figures_row["soc"]).figure(figures_row["figure"])
    assert figure is not None
    assert figure.value == float(figures_row["value"])
    assert figure.confidence == figures_row["confidence"]
    others = sorted(float(other) for other in figures_row["others"].split())
    assert sorted(float(one.value) for one in figure.alternatives) == others
    assert figure.source


def test_peak_rate(peaks_row: dict[str, str]) -> None:
    published = peaks_row["published"]
    rate = profile_for(peaks_row["soc"]).peak_tflops(peaks_row["dtype"])
    assert rate is not None
    decimals = len(published.partition(".")[2])
    assert f"{rate:.{decimals}f}" == published


def test_no_known_name_is_missing_from_the_transcription(
    transcription: Callable[[str], list[dict[str, str]]],
) -> None:
    transcribed = {row["soc_name"] for row in transcription("socs")}
    assert {soc.soc_name for soc in known_socs()} - transcribed == {"Ascend950"}


def test_runtime_value_gives_the_profile_of_its_name() -> None:
    for soc in known_socs():
        if soc.runtime_value is None:
            continue
        if soc.refusal is not None:
            with pytest.raises(UnsupportedSocError):
                profile_for(soc.runtime_value)
        elif soc.family is Family.A5:
            assert profile_for(soc.runtime_value).soc_name == "Ascend950"
        else:
            assert profile_for(soc.runtime_value) is profile_for(soc.soc_name)


def test_value_260_knows_the_family_and_no_core_count() -> None:
    profile = profile_for(260)
    assert profile.family is Family.A5
    assert (profile.cube_cores, profile.vector_cores, profile.product) == (None, None, None)
    assert profile.peak_tflops("float16") is None


@pytest.mark.parametrize("name", ["910B", "Ascend910B", 104])
def test_old_910b_is_refused_with_the_explanation(name: str | int) -> None:
    with pytest.raises(UnsupportedSocError, match="first generation") as caught:
        profile_for(name)
    assert "not an Atlas A2" in caught.value.reason
    assert "Ascend910B4-1" in caught.value.reason
    assert "104" in caught.value.reason


DTYPES = {
    "A2": {"float16", "bfloat16", "int8", "int4"},
    "A3": {"float16", "bfloat16", "int8", "int4"},
    "A5": {
        *("float16", "bfloat16", "int8", "float8_e4m3", "float8_e5m2"),
        *("hifloat8", "mxfp8", "mxfp4"),
    },
    "310P": {"float16", "int8", "int4"},
    "310B": {"float16", "bfloat16", "int8", "int4"},
}


@pytest.mark.parametrize(("family", "dtypes"), DTYPES.items())
def test_dtypes(family: str, dtypes: set[str]) -> None:
    assert profile_for(family).dtypes == dtypes


def test_doubts_of_dtypes() -> None:
    assert profile_for("310B").dtype_support["bfloat16"].confidence is Confidence.UNVERIFIED
    assert "hifloat4" in profile_for("Ascend950DT_9581").dtypes
    assert profile_for("Ascend950DT_9581").peak_tflops("hifloat4") is None
    assert "hifloat4" not in profile_for("Ascend950DT_9582").dtypes
    assert "removed" in profile_for("A5").dtype_support["int4"].note

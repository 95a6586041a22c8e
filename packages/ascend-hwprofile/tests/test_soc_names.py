from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ascend_hwprofile import (
    Family,
    HardwareProfile,
    SocId,
    UnknownSocError,
    UnsupportedSocError,
    known_socs,
    parse_soc_name,
    profile_for,
)

KNOWN = [soc.soc_name for soc in known_socs()]
names = st.sampled_from(KNOWN)
# Text near real names finds more than random text does.
pieces = st.lists(
    st.sampled_from(
        [*KNOWN, "Ascend", "910", "950", "PR_", "DT_", "310P3", "vir", "04", "B4", "-1", "_", " "]
    ),
    max_size=5,
).map("".join)


def outcome_of(function: Callable[[Any], Any], argument: object) -> object:
    """Return the result or the error."""
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001  # the tests say which errors are right
        return error


@given(st.text() | pieces | st.text(string.ascii_letters + string.digits + "_-", max_size=20))
@example("Ascend910B4-1vir99")
@example("\x00")
@example("\u017fascend910B1")
@example("9" * 100_000)
def test_any_text_parses_or_gives_our_error(text: str) -> None:
    outcome = outcome_of(parse_soc_name, text)
    if isinstance(outcome, SocId):
        assert parse_soc_name(outcome.soc_name) == outcome
        return
    assert type(outcome) is UnknownSocError
    assert outcome.reason
    assert outcome.found == text
    assert set(outcome.nearest) <= set(KNOWN)


@pytest.mark.parametrize("soc", known_socs(), ids=str)
def test_known_name_round_trip(soc: SocId) -> None:
    assert parse_soc_name(str(soc)) == soc


@given(names, st.data())
def test_spelling_does_not_matter(name: str, data: st.DataObject) -> None:
    flips = data.draw(st.lists(st.booleans(), min_size=len(name), max_size=len(name)))
    spelled = "".join(c.swapcase() if f else c for c, f in zip(name, flips, strict=True))
    if data.draw(st.booleans()):
        spelled = spelled[len("Ascend") :]
    blanks = st.sampled_from(["", " ", "\t", "\n "])
    spelled = data.draw(blanks) + spelled + data.draw(blanks)
    assert parse_soc_name(spelled) == parse_soc_name(name)


@given(st.from_regex(r"[0-9][0-9a-zA-Z]{2,5}", fullmatch=True), st.sampled_from(["PR", "DT"]))
def test_any_950_bin_is_a5(bin_name: str, kind: str) -> None:
    soc = parse_soc_name(f"Ascend950{kind}_{bin_name}")
    assert soc.family is Family.A5
    assert soc.product == f"950{kind}"
    profile = profile_for(soc)
    assert profile.npu_arch == 3510
    assert soc.in_data or profile.cube_cores is None


@given(st.integers() | st.booleans() | st.floats() | st.none() | st.binary() | st.text())
def test_profile_for_raises_nothing_else(anything: object) -> None:
    outcome = outcome_of(profile_for, anything)
    assert type(outcome) in {HardwareProfile, UnknownSocError, UnsupportedSocError}


def test_parts_of_names() -> None:
    sliced = parse_soc_name("ascend310p3vir04")
    assert (sliced.family, sliced.bin, sliced.slice_cores) == (Family.ATLAS_310P, "P3vir04", 4)
    assert parse_soc_name("Ascend910B4-1").bin == "B4-1"
    assert parse_soc_name("Ascend910_9363").bin == "9363"
    assert parse_soc_name(" ascend950DT_9581X ").bin == "9581X"
    pre_release = parse_soc_name("Ascend910_9599")
    assert (pre_release.pre_release, pre_release.product) == (True, None)
    assert parse_soc_name("Ascend910_5591").family is None


@pytest.mark.parametrize(
    ("text", "reason", "nearest"),
    [
        ("Ascend910B7", "no SoC in the data", "Ascend910B"),
        ("Ascend910_9399", "no SoC in the data", "Ascend910_9391"),
        ("310P3vir03", "slices known by name: vir01, vir02, vir04, vir08", "Ascend310P3"),
        ("Ascend910B3vir04", "slices known by name: none", "Ascend910B3"),
        ("Ascend910", "does not name a bin", "Ascend910_9391"),
        ("UNDEFINED", "found no device", ""),
        ("A5", "is a family", ""),
        ("  ", "empty", ""),
        ("x" * 65, "at most 64", ""),
        ("Ascend\uff1910B1", "ASCII", ""),
    ],
)
def test_unknown_text_gives_a_reason(text: str, reason: str, nearest: str) -> None:
    with pytest.raises(UnknownSocError, match=reason) as caught:
        parse_soc_name(text)
    assert nearest in (*caught.value.nearest, "")


def test_long_text_is_shortened_in_the_message() -> None:
    with pytest.raises(UnknownSocError) as caught:
        parse_soc_name("x" * 10_000)
    assert len(str(caught.value)) < 200


def test_text_must_be_text() -> None:
    with pytest.raises(UnknownSocError, match="must be text"):
        parse_soc_name(910)  # type: ignore[arg-type]  # on purpose


def test_an_unknown_name_says_what_is_allowed() -> None:
    with pytest.raises(UnknownSocError, match=r"'zzz'.*allowed: A2, A3, A5"):
        profile_for("zzz")

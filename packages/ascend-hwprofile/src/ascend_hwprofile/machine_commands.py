"""The commands that look at this machine: each returns a report and prints nothing.

Apart from the commands that only read the data, which start faster without these imports.
"""

from __future__ import annotations

from ascend_hwprofile import documents
from ascend_hwprofile.detection import detect
from ascend_hwprofile.diagnosis import Status, diagnose
from ascend_hwprofile.profile import HardwareProfile
from ascend_hwprofile.report import Report, Table, table


def detection(timeout_seconds: float) -> Report:
    """Say which SoC this machine has, and on what evidence."""
    found = detect(timeout_seconds=timeout_seconds)
    document = {**documents.header("detect"), **documents.of_detection(found)}
    evidence = [(one.probe, one.outcome, one.detail) for one in found.evidence]
    parts: list[Table | str] = [_verdict_line(found.profile, simulated=found.simulated)]
    parts.append(table("Evidence", ("probe", "outcome", "what it saw"), evidence))
    parts += [f"conflict: {sentence}" for sentence in found.conflicts]
    if found.profile is not None:
        return Report(document, tuple(parts))
    seen = "an NPU is there, but nothing names it" if found.npu_seen else "no Ascend NPU found"
    return Report(document, tuple(parts), error=found.refusal or seen, exit_code=1)


def _verdict_line(profile: HardwareProfile | None, *, simulated: bool) -> str:
    if profile is None:
        return "This machine: no usable profile"
    how = " (simulated, asked for by ASCEND_HWPROFILE)" if simulated else ""
    return f"This machine: {profile.soc_name}, family {profile.family}{how}"


def doctor(built_for: str | None, *, expect_npu: bool) -> Report:
    """Examine the software stack."""
    found = diagnose(built_for=built_for, expect_npu=expect_npu)
    document = {**documents.header("doctor"), **documents.of_diagnosis(found)}
    rows = [
        (check.status, check.subject, check.message, check.advice, "guess" if check.guess else "")
        for check in found.checks
    ]
    headers = ("status", "subject", "finding", "what to do", "basis")
    problems = sum(check.status is Status.PROBLEM for check in found.checks)
    error = f"{problems} problem(s) found" if problems else None
    return Report(document, (table("Doctor", headers, rows),), error, found.exit_code)

"""The doctor: what is installed, what does not fit together, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ascend_hwprofile import catalog
from ascend_hwprofile.built_for import build_family, built_for_problem, built_kernels
from ascend_hwprofile.components import Component, State, find_components
from ascend_hwprofile.detection import Detection, detect
from ascend_hwprofile.errors import UnknownSocError
from ascend_hwprofile.system import System
from ascend_hwprofile.versions import in_range, release
from ascend_hwprofile.words import Confidence


class Status(enum.StrEnum):
    """How a check ended. Only PROBLEM makes the doctor fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@attrs.frozen
class Check:
    """One statement of the doctor. ``guess`` marks a rule that no document states."""

    subject: str
    status: Status
    message: str
    advice: str = ""
    source: str = ""
    guess: bool = False


@attrs.frozen
class Diagnosis:
    """Everything the doctor found. ``exit_code`` is 1 if any check is a problem, else 0."""

    components: tuple[Component, ...]
    checks: tuple[Check, ...]
    detection: Detection
    exit_code: int


def diagnose(
    system: System | None = None, *, built_for: str | None = None, expect_npu: bool = False
) -> Diagnosis:
    """Examine the software stack of this machine.

    Args:
        system: what to look at; the real machine by default.
        built_for: build string or SoC name that some kernels were built for.
        expect_npu: treat missing NPU software as a problem even where no NPU was seen.

    Raises:
        UnknownSocError: ``built_for`` is neither a build string nor a SoC name.
    """
    if built_for is not None:
        build_family(built_for)
    system = system or System()
    table = catalog.read_table("compatibility")
    detection = detect(system)
    components = find_components(table, system)
    on_npu = expect_npu or detection.npu_seen
    checks = (
        *_hardware_checks(detection, expect_npu=expect_npu),
        *(_presence(component, on_npu=on_npu) for component in components),
        *_rule_checks(table, components),
        *_built_for_checks(system, detection, built_for),
    )
    failed = any(check.status is Status.PROBLEM for check in checks)
    return Diagnosis(components, checks, detection, int(failed))


def _hardware_checks(detection: Detection, *, expect_npu: bool) -> Iterator[Check]:
    profile = detection.profile
    if profile is not None:
        how = "simulated by ASCEND_HWPROFILE" if detection.simulated else "found"
        yield Check("hardware", Status.OK, f"{profile.soc_name} ({profile.family}), {how}")
    elif detection.refusal is not None:
        yield Check("hardware", Status.PROBLEM, detection.refusal)
    elif detection.npu_seen:
        advice = "source the CANN environment script, so that ACL can name the SoC"
        yield Check("hardware", Status.PROBLEM, "an NPU is there that nothing names", advice)
    else:
        status = Status.PROBLEM if expect_npu else Status.NOTE
        advice = "set ASCEND_HWPROFILE, such as ASCEND_HWPROFILE=A5, to simulate one"
        yield Check("hardware", status, "no Ascend NPU found", advice)
    for conflict in detection.conflicts:
        yield Check("hardware", Status.WARNING, f"conflicting evidence: {conflict}")


def _presence(component: Component, *, on_npu: bool) -> Check:
    subject = component.title
    if component.state is State.INSTALLED:
        known = component.version or "version unknown, so not checked"
        return Check(subject, Status.OK, f"{known} ({component.detail})")
    message = f"{component.state}: {component.detail}"
    serious = component.state is not State.NOT_INSTALLED or (component.needs_npu and on_npu)
    status = Status.PROBLEM if serious else Status.NOTE
    return Check(subject, status, message, component.advice)


def _rule_checks(table: Mapping[str, Any], components: tuple[Component, ...]) -> Iterator[Check]:
    found = {one.name: one for one in components}
    for rule in table["rule"]:
        check = _apply(rule, found[rule["component"]], found[rule["needs"]])
        if check is not None:
            yield check


def _apply(rule: Mapping[str, Any], one: Component, other: Component) -> Check | None:
    mine = release(one.version or "")
    if mine is None or ("when" in rule and not in_range(mine, rule["when"])):
        return None
    wanted = _wanted(rule, mine)
    subject = f"{one.title} and {other.title}"
    guess = rule["confidence"] == Confidence.UNVERIFIED
    theirs = release(other.version or "")
    if theirs is None:
        message = f"{one.title} {one.version} wants {other.title} {wanted}; none could be checked"
        return Check(subject, Status.NOTE, message, "", rule["source"], guess)
    if in_range(theirs, wanted):
        message = f"{one.title} {one.version} fits {other.title} {other.version}"
        return Check(subject, Status.OK, message, "", rule["source"], guess)
    message = f"{one.title} {one.version} wants {other.title} {wanted}, found {other.version}"
    status = Status.WARNING if guess else Status.PROBLEM
    advice = f"install {other.title} {wanted}"
    return Check(subject, status, message, advice, rule["source"], guess)


def _wanted(rule: Mapping[str, Any], mine: tuple[int, ...]) -> str:
    if "versions" in rule:
        versions: str = rule["versions"]
        return versions
    kept = [*mine, 0, 0][: rule["same_parts"]]
    upper = [*kept[:-1], kept[-1] + 1]
    return f">={'.'.join(map(str, kept))},<{'.'.join(map(str, upper))}"


def _built_for_checks(
    system: System, detection: Detection, built_for: str | None
) -> Iterator[Check]:
    profile = detection.profile
    asked = [(built_for, "--built-for")] if built_for is not None else []
    if profile is None:
        if asked:
            yield Check("kernels", Status.NOTE, f"{built_for}: no SoC to compare with")
        return
    for label, place in (*asked, *built_kernels(system)):
        try:
            problem = built_for_problem(label, profile)
        except UnknownSocError as error:
            yield Check("kernels", Status.WARNING, f"{place}: {error}")
            continue
        if problem is None:
            yield Check("kernels", Status.OK, f"{place}: built for {label}, fits")
        else:
            yield Check("kernels", Status.PROBLEM, f"{place}: {problem}")

"""Which SoC is this machine's? The evidence, in order, and what it amounts to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from ascend_hwprofile import probes
from ascend_hwprofile.catalog import family_table
from ascend_hwprofile.errors import HwProfileError, UnsupportedSocError
from ascend_hwprofile.probes import Evidence, Outcome
from ascend_hwprofile.profile import HardwareProfile
from ascend_hwprofile.profiles import profile_for
from ascend_hwprofile.system import System

__all__ = ["Detection", "Evidence", "Outcome", "detect"]

Probe = Callable[[System, float], Evidence]

# Strongest evidence first. The first probe that names a SoC decides.
_HARDWARE_PROBES: tuple[tuple[str, Probe], ...] = (
    ("acl", probes.acl),
    ("torch_npu", probes.torch_npu),
    ("device_files", probes.device_files),
    ("npu_smi", probes.npu_smi),
)
# A probe may kill its child process after its limit; the watchdog waits this much longer.
_GRACE_SECONDS = 1.0


@attrs.frozen
class Detection:
    """The profile of this machine, or None, and everything that was looked at.

    ``refusal`` says why there is no profile although some evidence names a SoC. ``simulated`` is
    true when ``ASCEND_HWPROFILE`` decided. ``conflicts`` are sentences on evidence that disagrees.
    """

    profile: HardwareProfile | None
    evidence: tuple[Evidence, ...]
    conflicts: tuple[str, ...] = ()
    refusal: str | None = None
    simulated: bool = False

    @property
    def npu_seen(self) -> bool:
        """Whether any hardware evidence was found, identified or not."""
        return any(
            one.outcome is Outcome.FOUND for one in self.evidence if one.probe != "environment"
        )


def detect(
    system: System | None = None, *, timeout_seconds: float = 5.0, cross_check: bool = True
) -> Detection:
    """Find out which SoC this machine has. Never raises and opens no device in this process.

    The order is: ``ASCEND_HWPROFILE`` (explicit simulation; nothing else is asked then), an ACL
    query in a child process, torch_npu if it is imported and initialised, device files, npu-smi.

    Args:
        system: what to look at; the real machine by default.
        timeout_seconds: limit for each probe.
        cross_check: ask every probe and report conflicts; False stops at the first one that names
            a SoC.
    """
    system = system or System()
    wish = _guarded("environment", probes.environment, system, timeout_seconds)
    if wish.outcome is not Outcome.NOTHING:
        profile, refusal = _profile_of(wish)
        return Detection(profile, (wish,), refusal=refusal, simulated=True)
    evidence = [wish]
    for name, probe in _HARDWARE_PROBES:
        evidence.append(_guarded(name, probe, system, timeout_seconds))
        if evidence[-1].names_a_soc and not cross_check:
            break
    return _judge(evidence, system, timeout_seconds)


def _judge(evidence: list[Evidence], system: System, timeout_seconds: float) -> Detection:
    named = [one for one in evidence if one.names_a_soc]
    if not named:
        return Detection(None, tuple(evidence))
    profile, refusal = _profile_of(named[0])
    if profile is not None:
        soc_name = profile.soc_name

        def ini(system: System, timeout_seconds: float) -> Evidence:
            del timeout_seconds
            return probes.platform_config(system, soc_name)

        evidence.append(_guarded("platform_config", ini, system, timeout_seconds))
    conflicts = (*_name_conflicts(named), *_number_conflicts(profile, evidence))
    return Detection(profile, tuple(evidence), conflicts, refusal)


def _profile_of(evidence: Evidence) -> tuple[HardwareProfile | None, str | None]:
    soc = evidence.soc_name if evidence.soc_name is not None else evidence.runtime_value
    if soc is None:
        return None, evidence.detail
    try:
        return profile_for(soc), None
    except HwProfileError as error:
        return None, str(error)


def _guarded(name: str, probe: Probe, system: System, timeout_seconds: float) -> Evidence:
    results: list[Evidence] = []

    def work() -> None:
        try:
            results.append(probe(system, timeout_seconds))
        # Detection must not fail because a driver does: whatever it was becomes evidence.
        except Exception as error:  # noqa: BLE001
            detail = f"{type(error).__name__}: {error}"
            results.append(Evidence(name, Outcome.FAILED, detail))

    worker = threading.Thread(target=work, name=f"ascend-hwprofile-{name}", daemon=True)
    worker.start()
    worker.join(timeout_seconds + _GRACE_SECONDS)
    if not results:
        return Evidence(name, Outcome.FAILED, f"no answer within {timeout_seconds:g} s")
    return results[0]


def _label(evidence: Evidence) -> str:
    """Return what the evidence points at, as far as it can be identified."""
    profile, _ = _profile_of(evidence)
    if profile is not None:
        return profile.soc_name
    try:
        profile_for(evidence.soc_name or evidence.runtime_value or 0)
    except UnsupportedSocError as error:
        return error.soc_name
    except HwProfileError:
        pass
    return f"unknown {evidence.soc_name or evidence.runtime_value!r}"


def _name_conflicts(named: list[Evidence]) -> list[str]:
    first, others = named[0], named[1:]
    return [
        f"{first.probe} points at {_label(first)}, {other.probe} at {_label(other)}"
        for other in others
        if not _agree(first, other)
    ]


def _agree(first: Evidence, other: Evidence) -> bool:
    mine, _ = _profile_of(first)
    theirs, _ = _profile_of(other)
    if mine is None or theirs is None:
        return _label(first) == _label(other)
    if mine.family is not theirs.family:
        return False
    # A slice reports the name of its chip in some places, and a family may have one shared name.
    chips = {profile.soc_name.partition("vir")[0] for profile in (mine, theirs)}
    return len(chips) == 1 or family_table(mine.family).shared_soc in chips


def _number_conflicts(profile: HardwareProfile | None, evidence: list[Evidence]) -> list[str]:
    if profile is None:
        return []
    ours: dict[str, int | None] = {
        "runtime_value": profile.runtime_value,
        "cube_cores": profile.cube_cores,
        "vector_cores": profile.vector_cores,
    }
    conflicts: list[str] = []
    for one in evidence:
        for name, known in ours.items():
            theirs: int | None = getattr(one, name)
            if theirs is not None and known is not None and theirs != known:
                conflicts.append(
                    f"{one.probe} reports {name} {theirs}, the data of {profile.soc_name} "
                    f"says {known}"
                )
    return conflicts

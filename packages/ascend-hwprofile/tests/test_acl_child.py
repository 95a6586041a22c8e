"""The ACL query against small libraries that are compiled here."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_hwprofile import Detection, Evidence, Outcome, System, detect
from ascend_hwprofile.system import run_command

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler for a fake ACL")

NAMED = 'const char *aclrtGetSocName(void) { return "Ascend910_9391"; }'
AFTER_INIT = """
static int ready = 0;
int aclInit(const char *config) { ready = config == 0; return 0; }
int aclFinalize(void) { ready = 0; return 0; }
const char *aclrtGetSocName(void) { return ready ? "Ascend910B4-1" : 0; }
"""
NAMELESS = (
    "int aclInit(const char *c) { return 1; } const char *aclrtGetSocName(void) { return 0; }"
)
NUMBERS = """
#include <stdio.h>
int aclplatformGetDeviceInfo(int what, char *value, unsigned size) {
    if (what == 15) return 100000;
    snprintf(value, size, "%d", what == 2 ? 24 : 48);
    return 0;
}
"""
CRASH_LATER = (
    NAMED
    + """
int aclplatformGetDeviceInfo(int what, char *value, unsigned size) {
    *(volatile int *)0 = 1;
    return 0;
}
"""
)
HANG = '#include <unistd.h>\nconst char *aclrtGetSocName(void) { sleep(60); return "Ascend910B1"; }'
TOUCH = NAMED + "\n#include <stdlib.h>\nint aclrtSetDevice(int device) { abort(); }"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], System]:
    def make(source: str) -> System:
        folder = tmp_path / "usr/local/Ascend/cann/lib64"
        folder.mkdir(parents=True)
        (tmp_path / "fake.c").write_text(source)
        library = folder / "libascendcl.so"
        assert COMPILER is not None
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-w", "-o", library, tmp_path / "fake.c"],
            check=True,
            timeout=60,
        )
        return System(environ={}, root=str(tmp_path), modules={}, run=run_command)

    return make


def acl(detection: Detection) -> Evidence:
    return next(one for one in detection.evidence if one.probe == "acl")


def soc_name(detection: Detection) -> str | None:
    return detection.profile.soc_name if detection.profile else None


@pytest.mark.parametrize("source", [NAMED, TOUCH, CRASH_LATER])
def test_name_is_read_without_opening_a_device(
    machine: Callable[[str], System], source: str
) -> None:
    detection = detect(machine(source), timeout_seconds=30)
    assert soc_name(detection) == "Ascend910_9391"
    assert acl(detection).cube_cores is None


def test_name_that_needs_initialisation(machine: Callable[[str], System]) -> None:
    assert soc_name(detect(machine(AFTER_INIT), timeout_seconds=30)) == "Ascend910B4-1"


def test_platform_numbers(machine: Callable[[str], System]) -> None:
    evidence = acl(detect(machine(NAMED + NUMBERS), timeout_seconds=30))
    assert (evidence.cube_cores, evidence.vector_cores) == (24, 48)


def test_library_without_a_name(machine: Callable[[str], System]) -> None:
    evidence = acl(detect(machine(NAMELESS), timeout_seconds=30))
    assert evidence.outcome is Outcome.NOTHING


def test_library_without_the_function(machine: Callable[[str], System]) -> None:
    evidence = acl(detect(machine("int nothing;"), timeout_seconds=30))
    assert evidence.outcome is Outcome.FAILED
    assert "aclrtGetSocName" in evidence.detail


def test_library_that_hangs(machine: Callable[[str], System]) -> None:
    evidence = acl(detect(machine(HANG), timeout_seconds=1.0))
    assert evidence.outcome is Outcome.FAILED
    assert "TimeoutExpired" in evidence.detail or "no answer" in evidence.detail

"""What the import costs is measured by benchmarks; here only what it must not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCH = "import json, sys; {}; print(json.dumps(sorted(sys.modules)))"


def modules_after(statement: str) -> set[str]:
    import json

    done = subprocess.run(
        [sys.executable, "-c", WATCH.format(statement)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_nothing_but_the_package() -> None:
    new = modules_after("import ascend_hwprofile") - modules_after("pass")
    assert new == {"ascend_hwprofile"}


def test_a_profile_needs_neither_torch_nor_rich() -> None:
    loaded = modules_after("import ascend_hwprofile as a; a.profile_for('A5')")
    assert "attr" in loaded
    assert not loaded & {"torch", "torch_npu", "rich", "numpy", "vllm", "argparse"}


def test_data_are_parsed_once_and_only_when_asked_for() -> None:
    count = (
        "import json as j; old = j.loads; seen = []; "
        "j.loads = lambda text: (seen.append(len(text)), old(text))[1]; "
        "import ascend_hwprofile as a; a.Capability; a.HwProfileError; a.profile_for; "
        "assert not seen, seen; "
        "a.profile_for('910B3'); a.profile_for('910b3'); a.profile_for(223); a.known_profiles(); "
        "assert len(seen) == 1, seen"
    )
    assert modules_after(count)


TRAP = """
import sys, types
class Trap(types.ModuleType):
    def __getattr__(self, name):
        raise RuntimeError('torch_npu.' + name + ' touched')
sys.modules['torch_npu'] = Trap('torch_npu')
import pkgutil, importlib, ascend_hwprofile
names = [m.name for m in pkgutil.walk_packages(ascend_hwprofile.__path__, 'ascend_hwprofile.')]
assert len(names) > 15, names
for name in names:
    importlib.import_module(name)
assert 'torch' not in sys.modules
"""


@pytest.mark.parametrize("fork", [False, True])
def test_no_module_touches_a_device(fork: bool) -> None:
    code = TRAP
    if fork:
        code = (
            "import os, sys\npid = os.fork()\n"
            "if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n" + TRAP
        )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_trap_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAP + "\nimport torch_npu; torch_npu.npu.init()"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "torch_npu.npu touched" in done.stderr

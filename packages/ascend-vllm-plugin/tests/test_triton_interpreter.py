"""The stage for vLLM's V2 runner: set before vLLM loads its kernels, cleared afterwards."""

import importlib
import importlib.metadata
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ascend_vllm_plugin import (
    EnvironmentVariableError,
    SimulationUnavailableError,
    compat,
    register,
)
from ascend_vllm_plugin.patches import triton_interpreter

TRITON = {
    "__init__.py": "import os\nINTERPRETED = os.environ['TRITON_INTERPRET'] == '1'\n",
    "backends.py": "from types import SimpleNamespace\n"
    "backends = {'nvidia': object()}\n"
    "Backend = lambda compiler, driver: SimpleNamespace(compiler=compiler, driver=driver)\n",
    "_C.py": "",
}
"""A Triton without a backend for CPUs, which knows from its import whether it is interpreted."""


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """The backends of that Triton as they are, and a vLLM that has loaded its kernels."""
    for name, text in TRITON.items():
        (tmp_path / "triton").mkdir(exist_ok=True)
        (tmp_path / "triton" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as modules:
        for name in [one for one in sys.modules if one.partition(".")[0] == "triton"]:
            modules.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.triton_utils", ModuleType("vllm.triton_utils"))
        monkeypatch.setattr(triton_interpreter, "find_spec", lambda name: object())
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        yield lambda: importlib.import_module("triton.backends").backends
        triton_interpreter.forget_triton()
        sys.modules.pop("triton._C", None)


@pytest.mark.parametrize(
    ("value", "requested"),
    [(None, False), ("0", False), ("00", False), ("1", True), ("2", True)],
)
def test_what_asks_for_the_v2_runner(value, requested, monkeypatch):
    if value is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    assert compat.v2_runner_requested() is requested


@pytest.mark.parametrize("value", ["maybe", "", "true", "1.0"])
def test_a_model_runner_that_vllm_cannot_read_is_refused(value, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    with pytest.raises(EnvironmentVariableError) as raised:
        compat.v2_runner_requested()
    assert str(raised.value) == (
        f"environment variable VLLM_USE_V2_MODEL_RUNNER={value!r}: "
        "allowed is 1 (vLLM's V2 model runner) or 0 (V1)"
    )


def test_vllm_finds_an_active_backend_for_cpus(triton):
    triton_interpreter.prepare("0.30.0")
    assert triton()["cpu"].driver.is_active()
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert "cpu" in importlib.metadata.version("vllm")


def test_preparing_twice_is_preparing_once(triton):
    before = len(sys.meta_path)
    triton_interpreter.prepare("0.30.0")
    triton_interpreter.prepare("0.30.0")
    assert len(sys.meta_path) == before + 1


def test_a_triton_that_is_loaded_for_its_compiler_is_loaded_again(triton):
    """`import vllm` loads Triton since 0.32, before any plugin is asked."""
    triton()
    compiled, library = sys.modules["triton"], importlib.import_module("triton._C")
    other = sys.modules["tritonclient"] = ModuleType("tritonclient")
    assert not compiled.INTERPRETED
    triton_interpreter.prepare("0.32.0")
    assert sys.modules["triton"].INTERPRETED
    assert sys.modules["triton._C"] is library
    assert sys.modules.pop("tritonclient") is other
    interpreted = sys.modules["triton"]
    triton_interpreter.prepare("0.32.0")
    assert sys.modules["triton"] is interpreted


def test_nothing_but_vllm_is_found(triton):
    triton_interpreter.prepare("0.30.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-of-nobody")


def test_nobody_else_sees_the_stage(triton):
    before = list(sys.meta_path)
    triton_interpreter.prepare("0.30.0")
    triton_interpreter.tidy()
    assert set(triton()) == {"nvidia"}
    assert sys.meta_path == before


def test_a_real_backend_for_cpus_is_left_alone(triton, monkeypatch):
    triton()["cpu"] = real = SimpleNamespace(driver=object())
    found = SimpleNamespace(names={"cpu", "nvidia"})
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    triton_interpreter.prepare("0.30.0")
    assert os.environ["TRITON_INTERPRET"] == "0"
    triton_interpreter.tidy()
    assert triton()["cpu"] is real


def test_the_v2_runner_without_triton_is_refused(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_SIMULATE", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(compat, "installed_vllm", lambda: "0.30.0")
    monkeypatch.setattr(triton_interpreter, "find_spec", lambda name: None)
    with pytest.raises(SimulationUnavailableError, match="needs Triton, which is not installed"):
        register()

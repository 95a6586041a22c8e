"""A package imports only layers below it; importing one touches no device and no other library."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = (
    "ascend_hwprofile",
    "ascend_attn_ops",
    "ascend_attn_backends",
    "ascend_specdecode",
    "ascend_vllm_plugin",
)
# package -> foreign packages it must never import, not even inside a function
FORBIDDEN = {
    "ascend_hwprofile": {"torch", "vllm", "transformers", "anyio"},
    "ascend_attn_ops": {"vllm", "anyio"},
    "ascend_attn_backends": {"vllm", "anyio"},
    "ascend_specdecode": {"vllm"},
    "ascend_vllm_plugin": set(),
}
# packages that no module may import while it is itself being imported
LAZY = {"torch_npu", "vllm", "transformers", "cann_ops_transformer"}


def source(layer: str) -> Path:
    return ROOT / "packages" / layer.replace("_", "-") / "src" / layer


def modules(layer: str) -> list[str]:
    names = []
    for path in sorted(source(layer).rglob("*.py")):
        parts = path.relative_to(source(layer).parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not name.endswith("__main__")]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def broken_imports(layer: str, text: str) -> set[str]:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    return set(imports(ast.parse(text))) & (above | FORBIDDEN[layer])


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_layers_below(layer: str) -> None:
    paths = list(source(layer).rglob("*.py"))
    assert paths
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in paths
        if (found := broken_imports(layer, path.read_text("utf-8")))
    }
    assert wrong == {}


def test_an_import_from_above_is_noticed() -> None:
    text = "def f():\n    from ascend_vllm_plugin import register\n"
    assert broken_imports("ascend_attn_ops", text) == {"ascend_vllm_plugin"}
    assert broken_imports("ascend_specdecode", "import vllm.config\n") == {"vllm"}


CHILD = textwrap.dedent(
    """
    import importlib, os, sys, types

    class Device(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            raise RuntimeError(f"the device was touched: torch_npu.{name}")

    sys.modules["torch_npu"] = Device("torch_npu")
    names = sys.argv[2:]
    lazy = set(sys.argv[1].split(","))
    before = dict(os.environ)
    for name in names:
        importlib.import_module(name)
    assert dict(os.environ) == before, "the environment was changed"
    loaded = sorted((lazy - {"torch_npu"}) & set(sys.modules))
    assert not loaded, f"imported at import time: {loaded}"
    if os.fork() == 0:
        os._exit(0)
    assert os.wait()[1] == 0
    print(len(names))
    """
)


def import_in_child(names: list[str], lazy: set[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, ",".join(sorted(lazy)), *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_importing_every_module_touches_nothing(layer: str) -> None:
    names = modules(layer)
    if (
        layer == "ascend_vllm_plugin"
    ):  # its adapters subclass vLLM's classes; the entry points do not
        names = ["ascend_vllm_plugin", "ascend_vllm_plugin.compat"]
    done = import_in_child(names, LAZY)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names)


def test_touching_a_device_at_import_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "touches.py").write_text("import torch_npu\ntorch_npu.npu.set_device(0)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = import_in_child(["touches"], LAZY)
    assert done.returncode != 0
    assert "the device was touched: torch_npu.npu" in done.stderr

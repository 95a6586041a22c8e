"""Who takes layers that must compute what training computes, and why the others do not."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from fa3_support import stand_in
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendAttentionBackend,
    AscendFABackend,
    BackendRequest,
    NoBackendError,
    get_attn_backend_cls,
    select_backend,
)
from ascend_attn_backends.cli import main
from ascend_attn_backends.selection import backend_classes
from ascend_attn_ops import Refusal
from ascend_hwprofile import profile_for

PLAIN = BackendRequest(
    head_size=128, num_heads=32, num_kv_heads=8, dtype=torch.bfloat16, provider="reference"
)
ASKED = attrs.evolve(PLAIN, training_consistency=True)
PROFILES = ["A2", "A3", "A5"]


def refusals(request: BackendRequest, profile: str = "A2", name: str = "fa3") -> list[Refusal]:
    return backend_classes()[name].refusals(request, profile_for(profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_fa3_replaces_standard_where_it_is_asked_for(profile: str) -> None:
    selection = select_backend(ASKED, profile_for(profile))
    assert selection.backend == "fa3"
    assert selection.backend_class is AscendFABackend
    assert [verdict.backend for verdict in selection.verdicts if verdict.accepted] == ["fa3"]
    (refusal,) = refusals(ASKED, profile, "standard")
    assert refusal.rule == "standard.training_consistency"
    assert (refusal.found, refusal.allowed) == ("True", "False")


@pytest.mark.parametrize("profile", PROFILES)
def test_otherwise_standard_stays(profile: str) -> None:
    selection = select_backend(PLAIN, profile_for(profile))
    assert selection.backend == "standard"
    (refusal,) = refusals(PLAIN, profile)
    assert refusal.rule == "fa3.training_consistency"
    assert (refusal.found, refusal.allowed) == ("False", "True")
    assert get_attn_backend_cls() is AscendAttentionBackend


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "sliding_window": ({"sliding_window": 4096}, "4096", "None"),
    "graph_mode": ({"graph_mode": "full_decode_only"}, "full_decode_only", "none or piecewise"),
    "attn_type": ({"attn_type": "encoder_only"}, "encoder_only", "decoder"),
    "has_sinks": ({"has_sinks": True}, "True", "False"),
    "has_multimodal_prefix": ({"has_multimodal_prefix": True}, "True", "False"),
    "has_alibi": ({"has_alibi": True}, "True", "False"),
    "logits_soft_cap": ({"logits_soft_cap": 30.0}, "30.0", "None"),
    "per_head_quant_scales": ({"per_head_quant_scales": True}, "True", "False"),
    "context_parallel_size": ({"context_parallel_size": 2}, "2", "1"),
    "kv_cache_dtype": ({"kv_cache_dtype": "int8"}, "int8", "auto or bfloat16"),
    "head_size": ({"head_size": 320}, "320", "at most 256"),
    "num_heads": ({"num_heads": 9}, "9", "a multiple of the 8 key/value heads"),
    "block_size": ({"block_size": 16}, "16", "128"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_fa3_refuses(rule: str) -> None:
    change, found, allowed = REFUSED[rule]
    request = attrs.evolve(ASKED, **change)
    (refusal,) = refusals(request)
    assert (refusal.rule, refusal.parameter) == (f"fa3.{rule}", rule)
    assert refusal.found == found
    assert refusal.allowed.startswith(allowed)
    assert refusal.source
    selection = select_backend(request, profile_for("A2"))
    assert selection.backend is None  # nobody computes something else instead, in silence
    with pytest.raises(NoBackendError, match=f"fa3.{rule}"):
        _ = selection.backend_class


@pytest.mark.parametrize("mode", ["full", "full_decode_only", "full_and_piecewise"])
def test_captured_decode_steps_are_refused(mode: str) -> None:
    (refusal,) = refusals(attrs.evolve(ASKED, graph_mode=mode))
    assert refusal.rule == "fa3.graph_mode"
    assert "tiled on the host" in refusal.source
    assert refusals(attrs.evolve(ASKED, graph_mode="piecewise")) == []
    assert select_backend(attrs.evolve(PLAIN, graph_mode=mode), profile_for("A2")).backend


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False},
        {"role": "draft"},
        {"batch_invariant": True},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"num_heads": 8, "head_size": 256},
    ],
)
def test_what_fa3_takes(change: dict[str, Any]) -> None:
    assert refusals(attrs.evolve(ASKED, **change)) == []


def test_block_sizes_of_a5() -> None:
    for size in (128, 256, 512, 1024):
        assert refusals(attrs.evolve(ASKED, block_size=size), "A5") == []
    (refusal,) = refusals(attrs.evolve(ASKED, block_size=64), "A5")
    assert refusal.allowed == "128 or 256 or 512 or 1024"


def test_310p_is_refused_simulated_too() -> None:
    (refusal,) = refusals(attrs.evolve(ASKED, dtype=torch.float16), "310P")
    assert refusal.rule == "fa3.product"
    assert "310P" in refusal.found
    assert refusal.allowed == "A2 or A3 or A5"


@pytest.mark.parametrize("flags", [(True, False, False), (True, True, False), (True, False, True)])
def test_other_architectures_have_no_such_backend(flags: tuple[bool, bool, bool]) -> None:
    names = ("use_mla", "use_sparse", "use_compress")
    request = attrs.evolve(ASKED, **dict(zip(names, flags, strict=True)))
    selection = select_backend(request, profile_for("A5"))
    assert selection.backend is None
    for verdict in selection.verdicts:
        rules = {refusal.rule for refusal in verdict.refusals}
        if verdict.backend != "fa3":
            assert f"{verdict.backend}.training_consistency" in rules
        else:
            assert "fa3.use_mla" in rules


@given(
    st.sampled_from(list(itertools.product([False, True], repeat=3))),
    st.sampled_from([*PROFILES, "310P"]),
    st.sets(st.sampled_from(sorted(REFUSED))),
    st.booleans(),
)
def test_routing_matrix(
    flags: tuple[bool, bool, bool], profile: str, broken: set[str], asked: bool
) -> None:
    """fa3 is taken when it is asked for and nothing is broken; its reasons are the broken terms."""
    names = ("use_mla", "use_sparse", "use_compress")
    changes = {key: value for rule in broken for key, value in REFUSED[rule][0].items()}
    changes |= dict(zip(names, flags, strict=True))
    request = attrs.evolve(PLAIN, training_consistency=asked, **changes)
    expected = {f"fa3.{rule}" for rule in broken}
    expected |= {f"fa3.{name}" for name, flag in zip(names, flags, strict=True) if flag}
    if profile == "310P":
        expected = (expected - {"fa3.block_size"}) | {"fa3.product"}
    elif profile == "A5" and "block_size" not in broken:
        expected -= {"fa3.block_size"}
    if not asked:
        expected |= {"fa3.training_consistency"}
    assert {refusal.rule for refusal in refusals(request, profile)} == expected
    chosen = select_backend(request, profile_for(profile)).backend
    assert (chosen == "fa3") == (not expected)
    if asked:
        assert chosen in ("fa3", None)


class TestPackage:
    """Without a host provider the package must be there; looking for it imports nothing."""

    request_ = attrs.evolve(ASKED, provider=None)

    def test_it_is_missing_here_and_that_is_said(self) -> None:
        (refusal,) = refusals(self.request_)
        assert refusal.rule == "fa3.package"
        assert refusal.parameter == "flash-attn-npu"
        assert "not installed: no module flash_attn_npu_3 or flash_attn_npu_v3" in refusal.found
        assert "pip install flash-attn-npu" in refusal.allowed

    @pytest.mark.parametrize("name", ["flash_attn_npu_3", "flash_attn_npu_v3"])
    def test_it_is_enough_that_one_of_its_modules_is_there(self, name: str) -> None:
        with stand_in(name):
            assert refusals(self.request_) == []
            assert select_backend(self.request_, profile_for("A3")).backend == "fa3"

    def test_version_2_of_the_algorithm_does_not_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn_npu", ModuleType("flash_attn_npu"))
        assert [refusal.rule for refusal in refusals(self.request_)] == ["fa3.package"]

    def test_float32_is_only_simulated(self) -> None:
        with stand_in():
            (refusal,) = refusals(attrs.evolve(self.request_, dtype=torch.float32))
        assert refusal.rule == "fa3.dtype"
        assert refusal.allowed == "float16 or bfloat16"
        assert refusals(attrs.evolve(ASKED, dtype=torch.float32)) == []

    def test_asking_imports_nothing(self, tmp_path: Path) -> None:
        """The package probes the device while it is imported; a fake one says when that happens."""
        package = tmp_path / "flash_attn_npu_3"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('the device was touched')\n")
        code = (
            "import torch, ascend_attn_backends as b\n"
            "from ascend_hwprofile import profile_for\n"
            "r = b.BackendRequest(head_size=128, num_heads=8, num_kv_heads=8,"
            " dtype=torch.bfloat16, training_consistency=True)\n"
            "print(b.select_backend(r, profile_for('A2')).backend)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": f"{tmp_path}:{':'.join(filter(None, sys.path))}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout.strip() == "fa3", done.stderr
        control = subprocess.run(
            [sys.executable, "-c", "import flash_attn_npu_3"],
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "the device was touched" in control.stderr


class TestExplain:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        config = {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "hidden_size": 4096, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
        return tmp_path

    def run(
        self, capsys: pytest.CaptureFixture[str], model: Path, *options: str
    ) -> tuple[str | None, dict[str, Any]]:
        main(["explain", "--config", str(model), "--profile", "A2", *options, "--json"])
        (layer,) = json.loads(capsys.readouterr().out)["layers"]
        (verdict,) = [entry for entry in layer["verdicts"] if entry["backend"] == "fa3"]
        return layer["backend"], {entry["rule"]: entry for entry in verdict["refusals"]}

    def test_says_why_fa3_is_not_available(
        self, capsys: pytest.CaptureFixture[str], model: Path
    ) -> None:
        backend, found = self.run(capsys, model)
        assert backend == "standard"
        assert set(found) == {"fa3.training_consistency", "fa3.package"}
        backend, found = self.run(capsys, model, "--training-consistency")
        assert backend is None
        assert set(found) == {"fa3.package"}
        assert "not installed" in found["fa3.package"]["found"]

    def test_with_the_package(self, capsys: pytest.CaptureFixture[str], model: Path) -> None:
        with stand_in():
            assert self.run(capsys, model, "--training-consistency") == ("fa3", {})
            options = ("--training-consistency", "--graph-mode", "full_decode_only")
            backend, found = self.run(capsys, model, *options)
        assert backend is None
        assert set(found) == {"fa3.graph_mode"}
        assert found["fa3.graph_mode"]["found"] == "full_decode_only"


def test_unknown_graph_modes_are_named() -> None:
    with pytest.raises(ValueError, match="graph_mode"):
        attrs.evolve(PLAIN, graph_mode="always")


def test_the_backend_names_no_module_that_is_imported_with_it() -> None:
    importlib.import_module("ascend_attn_backends.fa3.backend")
    assert not [name for name in sys.modules if name.startswith("flash_attn_npu")]

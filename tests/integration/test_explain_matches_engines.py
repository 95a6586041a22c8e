"""`ascend-vllm explain` says of a model what the engine that serves it wrote to its routing file.

The engines are those of `tiny_engines.py`, on one rank and on two; the command gets their options.
For DFlash drafts `test_draft_engines.py` compares the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import environment, run_script
from several_engines import Outcome
from tiny_engines import HAS_COMPRESSED_KERNELS, rank_engines, single_engines

from ascend_vllm_plugin import RoutingTable, read_routing
from ascend_vllm_plugin.routing import parse_routing

pytestmark = pytest.mark.engine

ALONE = {
    "sfa, mtp 1": [
        ("draft", "sfa", 1),
        ("draft", "sfa_indexer", 1),
        ("target", "sfa", 3),
        ("target", "sfa_indexer", 2),
    ],
    "dsa": [("target", "dsa", 1)] * 3,
}
"""Engine on one rank -> role, backend and number of layers of its rows."""
ON_RANKS = {
    "sfa, dcp": [("target", "sfa_dcp", 3), ("target", "sfa_indexer", 2)],
    "sfa, pcp": [("target", "sfa_indexer", 2), ("target", "sfa_pcp", 3)],
}
"""The same of engines on two ranks."""
V2_ON_RANKS = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def option(name: str, value: Any) -> list[str]:
    """An argument of an engine as `vllm serve` takes it; what is off is off by default."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def command(engine: dict[str, Any]) -> dict[str, Any]:
    """`ascend-vllm explain` with the arguments of an engine."""
    arguments = dict(engine["engine"])
    model = arguments.pop("model")
    options = (word for item in arguments.items() for word in option(*item))
    return {"name": engine["name"], "arguments": ["explain", model, "--json", *options]}


def explained(
    engines: list[dict[str, Any]], folder: Path, **variables: str
) -> dict[str, RoutingTable]:
    """What the command says of each engine; one process loads vLLM for all."""
    job = {"commands": [command(engine) for engine in engines]}
    said, _ = run_script("cli_probe.py", job, folder, environment(True, **variables))
    assert [done["err"] for done in said.values() if done["code"] != 0] == []
    return {name: parse_routing(done["out"]) for name, done in said.items()}


@pytest.fixture(scope="module")
def alone(
    single: Outcome, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, RoutingTable]:
    engines = [engine for engine in single_engines(tiny_models) if engine["name"] in ALONE]
    return explained(engines, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def on_ranks(
    ranks: list[Outcome], tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, RoutingTable]:
    engines = [engine for engine in rank_engines(tiny_models) if engine["name"] in ON_RANKS]
    return explained(engines, tmp_path_factory.mktemp("on_ranks"), **V2_ON_RANKS)


def rows(table: RoutingTable) -> list[tuple[str, str, int]]:
    """Role, backend and number of layers of each row, in the order of the alphabet."""
    return sorted((row.role, row.backend, len(row.layers)) for row in table.rows)


@pytest.mark.parametrize("name", ALONE)
def test_explain_says_what_an_engine_does(
    name: str, single: Outcome, alone: dict[str, RoutingTable]
) -> None:
    if name == "dsa" and not HAS_COMPRESSED_KERNELS:
        pytest.skip("vLLM's build for this processor (no avx512_bf16) lacks hc_pre_fused_cpu")
    assert alone[name] == read_routing(single.folder / f"{name}.routing.json")
    assert rows(alone[name]) == ALONE[name]


@pytest.mark.parametrize("name", ON_RANKS)
def test_explain_says_what_an_engine_on_two_ranks_does(
    name: str, ranks: list[Outcome], on_ranks: dict[str, RoutingTable]
) -> None:
    assert on_ranks[name] == read_routing(ranks[0].folder / f"{name}.routing.json")
    assert rows(on_ranks[name]) == ON_RANKS[name]

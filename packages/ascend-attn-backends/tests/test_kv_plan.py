"""Plans of a DeepSeek-V4 model's caches: against Hugging Face's caches, real tensors and runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    DsaAttnKvPlan,
    DsaCacheGroup,
    DsaCompression,
    DsaKvPlanError,
    DsaKvPlanOptions,
    DsaModelShape,
    DsaTables,
    get_dsa_attn_kv_plan,
)
from ascend_attn_backends.cli import main
from ascend_attn_backends.explain import ModelConfig, ModelConfigError, compressions
from ascend_hwprofile import profile_for

pytest.importorskip("transformers", reason="the test extra installs transformers")

from dsa_hugging_face import KEY, KINDS, Layer, Model, Tables, run
from latent_schedules import Chunk, schedules
from transformers import DeepseekV4Config, DynamicCache, Qwen3Config

SPARSE, HEAVY = DsaCompression(4, 512), DsaCompression(128)
FLASH = DsaModelShape(layers=[HEAVY, HEAVY, *[HEAVY, SPARSE] * 20, HEAVY], num_heads=64)
MODEL = Model.random()


def tiny_shape(model: Model = MODEL) -> DsaModelShape:
    return DsaModelShape(
        layers=[model.compression(layer) for layer in range(len(KINDS))],
        num_heads=4,
        window=model.config.sliding_window,
        key_size=KEY,
        index_heads=model.config.index_n_heads,
        index_size=model.config.index_head_dim,
        dtype=torch.float32,
    )


def tiny_plan(num_spec_tokens: int = 8, **options: Any) -> DsaAttnKvPlan:
    cut = {"block_size": 16, "block_tokens": 64, "state_block_size": 16, **options}
    return get_dsa_attn_kv_plan(
        tiny_shape(), DsaKvPlanOptions(num_spec_tokens=num_spec_tokens, **cut)
    )


def cached_rows(cache: DynamicCache, layer: int) -> dict[str, int]:
    """Rows that a layer of Hugging Face's cache holds, under our names."""
    found = cache.layers[layer]
    rows = {"window": found.keys.shape[2]}
    for theirs, keys, state in (
        ("compressor", "compressed", "state"),
        ("indexer", "index", "index_state"),
    ):
        if theirs not in getattr(found, "compressed_kv", {}):
            continue
        overlap = getattr(found, "overlap_kv", {}).get(theirs)
        rows[keys] = found.compressed_kv[theirs].shape[1]
        rows[state] = found.buffer_kv[theirs].shape[1] + (
            0 if overlap is None else overlap.shape[1]
        )
    return rows


@torch.no_grad()
def test_rows_are_those_of_hugging_faces_caches() -> None:
    """After every chunk, for each kind of layer. Theirs are read off the tensors they hold."""
    plan, cache = tiny_plan(), DynamicCache(config=MODEL.config)
    length = 0
    for chunk in [1, 2, 3, 1, 1, 9, 4, 7, 1, 1, 1, 8, 16, 3]:
        hidden, positions = torch.randn(1, chunk, 48), torch.arange(length, length + chunk)[None]
        length += chunk
        for number, module in enumerate(MODEL.layers):
            rotary = {
                kind: MODEL.rotary(hidden, positions, layer_type=kind)
                for kind in ("main", "compress")
            }
            module(hidden, rotary, positions, None, cache)
            expected = {group.cache: group.rows(length) for group in plan.groups_of(number)}
            assert cached_rows(cache, number) == expected


class Allocator:
    """Gives each step the blocks that the plan says it needs, from pools of the plan's size.

    Whatever a request gives back, and whatever it gets, is overwritten with NaN; block 0 is
    nobody's. ``forget`` columns too few show that the plan names none too many.
    """

    def __init__(self, plan: DsaAttnKvPlan, requests: int, longest: int, step: int, forget: str):
        self.plan, self.forget = plan, forget
        pools = plan.pool_blocks(requests, longest, step)
        self.free: dict[tuple[int, str], list[int]] = {}
        self.held: dict[tuple[int, str, int], dict[int, int]] = {}
        for number in range(len(KINDS)):
            for group in plan.groups_of(number):
                last = pools[group.name] + 1 - group.null_blocks
                self.free[number, group.cache] = list(range(1, last))
        self.width = max(-(-longest // 16), 1)

    def __call__(self, layer: Layer, starts: Sequence[int], ends: Sequence[int]) -> Tables:
        tables = {}
        for group in self.plan.groups_of(layer.number):
            table = torch.zeros(len(ends), self.width, dtype=torch.int32)
            for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
                for column, block in self.blocks(layer, group, row, start, end).items():
                    table[row, column] = block
            tables[group.cache] = table
        if layer.compression is None:
            return tables["window"], None
        found = DsaTables(compressed=tables["compressed"], state=tables["state"])
        return tables["window"], found

    def blocks(
        self, layer: Layer, group: DsaCacheGroup, row: int, start: int, end: int
    ) -> dict[int, int]:
        free = self.free[layer.number, group.cache]
        held = self.held.setdefault((layer.number, group.cache, row), {})
        columns = group.columns(start, end)
        assert len(columns) <= group.max_blocks(end, end - start)
        if group.name == self.forget:
            columns = columns[1:]
        for column in [column for column in held if column not in columns]:
            free.append(held.pop(column))
        for column in columns:
            if column not in held:
                held[column] = free.pop()
                self.overwrite(layer, group, held[column])
        return held

    def overwrite(self, layer: Layer, group: DsaCacheGroup, block: int) -> None:
        for cache in (group.cache, group.cache.replace("compressed", "index")):
            if cache in layer.memory:
                layer.memory[cache][block] = math.nan
        for state in layer.states.get(group.cache, ()):
            state[block] = math.nan


def planned_run(
    schedule: list[list[Chunk]], seed: int = 0, forget: str = ""
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A run in which every step has the plan's blocks alone."""
    requests = len(schedule[0])
    lengths = [
        sum(kept + rejected for kept, rejected in rows) for rows in zip(*schedule, strict=True)
    ]
    step = max(1, *(kept + rejected for rows in schedule for kept, rejected in rows))
    allocator = Allocator(tiny_plan(), requests, max(lengths), step, forget)
    most = 1 + max(block for blocks in allocator.free.values() for block in (0, *blocks))
    return run(MODEL, schedule, seed, allocator=allocator, num_blocks=most)


@given(schedules(), st.integers(0, 99))
def test_the_planned_blocks_are_enough(schedule: list[list[Chunk]], seed: int) -> None:
    """Old blocks are given away and overwritten; pools hold what the plan says, and no more."""
    for found, expected in zip(*planned_run(schedule, seed), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("forget", ["window", "compressed/4", "compressed/8", "state/8", "state/4"])
def test_control_one_block_less_is_noticed(forget: str) -> None:
    schedule = [[(37, 0), (21, 0)], [(1, 8), (2, 3)], [(4, 0), (9, 0)]]
    found, expected = planned_run(schedule, forget=forget)
    equal = [
        torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, expected, strict=True)
    ]
    touched = {"4": {1}, "8": {2}}.get(forget[-1], {0, 1, 2})
    assert [layer for layer, same in enumerate(equal) if not same] == sorted(touched)


GROUPS = st.builds(
    lambda cache, compression, rows, k: DsaCacheGroup(
        cache=cache,
        layers=(0,),
        compression=None if cache == "window" else compression,
        rows_per_block=rows,
        row_size=8,
        dtype=torch.bfloat16,
        window=128,
        num_spec_tokens=k,
    ),
    st.sampled_from(["window", "compressed", "state"]),
    st.sampled_from([SPARSE, HEAVY, DsaCompression(8), DsaCompression(6, 3)]),
    st.sampled_from([16, 48, 128]),
    st.integers(0, 8),
)


@given(GROUPS, st.integers(0, 3000), st.integers(1, 400))
def test_no_step_needs_more_blocks_than_the_bound(
    group: DsaCacheGroup, start: int, step: int
) -> None:
    columns = group.columns(start, start + step)
    assert len(columns) <= group.max_blocks(start + step, step)
    assert columns == sorted(set(columns))


@pytest.mark.parametrize("step", [1, 4, 40, 300])
@pytest.mark.parametrize("group", get_dsa_attn_kv_plan(FLASH).groups, ids=lambda group: group.name)
def test_the_bound_is_met(group: DsaCacheGroup, step: int) -> None:
    """Some step of at most that length does need as many blocks."""
    group = attrs.evolve(group, num_spec_tokens=3)
    starts, steps = range(4096, 4096 + 128), range(max(step - 127, 1), step + 1)
    most = max(len(group.columns(start, start + n)) for start in starts for n in steps)
    assert most == group.max_blocks(4096 + 127 + step, step)


@pytest.mark.parametrize("group", get_dsa_attn_kv_plan(FLASH).groups, ids=lambda group: group.name)
def test_bytes_are_those_of_real_tensors(group: DsaCacheGroup) -> None:
    memory = group.allocate(3)
    assert sum(tensor.nbytes for tensor in memory) == 3 * group.block_bytes
    assert {tensor.dtype for tensor in memory} == {group.dtype}


def test_bytes_per_token_by_hand() -> None:
    """Keys of 512 and index keys of 128 in bfloat16: 20 sparse layers, 23 heavy ones."""
    plan = get_dsa_attn_kv_plan(FLASH)
    assert plan.bytes_per_token == 20 * (1024 + 256) / 4 + 23 * 1024 / 128
    assert plan.request_blocks(8192) == {
        "window": 2,
        "compressed/128": 4,
        "state/128": 8,
        "compressed/4": 16,
        "index/4": 16,
        "state/4": 2,
        "index_state/4": 2,
    }
    by_hand = 43 * 2 * 128 * 1024 + 23 * (4 * 16 * 1024 + 8 * 16 * 4096)
    by_hand += 20 * (16 * 128 * (1024 + 256) + 2 * 16 * (8192 + 2048))
    assert plan.request_bytes(8192) == by_hand
    other = plan.compare(8192)
    assert other.mla == 43 * 8192 * 1152
    assert other.uncompressed == 43 * 8192 * 1024
    assert other.mha == 43 * 8192 * 64 * 2048
    assert other.dsa == by_hand


def test_a_short_request_takes_no_more_than_itself() -> None:
    plan = get_dsa_attn_kv_plan(FLASH)
    assert set(plan.request_blocks(1, step_tokens=8192).values()) == {0, 1}
    assert plan.request_bytes(0) == 0


def test_which_layer_keeps_what() -> None:
    shape = DsaModelShape(layers=[None, SPARSE, HEAVY], num_heads=64)
    plan = get_dsa_attn_kv_plan(shape)
    assert [[g.cache for g in plan.groups_of(layer)] for layer in range(3)] == [
        ["window"],
        ["window", "compressed", "index", "state", "index_state"],
        ["window", "compressed", "state"],
    ]
    with pytest.raises(KeyError):
        plan.group("compressed/2")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "layers": ({"layers": []}, {}, "0", "at least one"),
    "dtype": ({"dtype": torch.int8}, {}, "int8", "bfloat16"),
    "block_size": ({}, {"block_size": 24}, "24", "a multiple of 16"),
    "state_block_size": ({}, {"state_block_size": 2048}, "2048", "up to 1024"),
    "num_spec_tokens": ({}, {"num_spec_tokens": -1}, "-1", "at least 0"),
    "max_step_tokens": ({}, {"max_step_tokens": 3, "num_spec_tokens": 3}, "3", "more than the 3"),
    "block_tokens": ({}, {"block_tokens": 520}, "520", "a multiple of 64"),
    "top_k": ({"layers": [SPARSE, DsaCompression(4, 1024)]}, {}, "compressed by 4", "one top_k"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_impossible_plans_are_refused(rule: str) -> None:
    shape, options, found, allowed = REFUSED[rule]
    with pytest.raises(DsaKvPlanError) as raised:
        get_dsa_attn_kv_plan(attrs.evolve(FLASH, **shape), DsaKvPlanOptions(**options))
    (refusal,) = raised.value.refusals
    assert refusal.rule == f"kv_plan.{rule}"
    assert found in refusal.found
    assert allowed in refusal.allowed
    assert refusal.source
    assert str(refusal) in str(raised.value)


def test_every_broken_rule_is_named_at_once() -> None:
    options = DsaKvPlanOptions(block_size=8, block_tokens=0, state_block_size=0)
    with pytest.raises(DsaKvPlanError) as raised:
        get_dsa_attn_kv_plan(FLASH, options)
    rules = {refusal.rule for refusal in raised.value.refusals}
    assert rules == {"kv_plan.block_size", "kv_plan.block_tokens", "kv_plan.state_block_size"}


@pytest.mark.parametrize(
    ("profile", "changes", "parts"),
    [
        ("A3", {}, []),
        ("A5", {}, []),
        ("A2", {}, ["dsa.capability", "dsa_indexer.capability"]),
        ("310P", {}, ["dsa.capability", "dsa_indexer.capability"]),
        ("A3", {"window": 256}, ["sparse_flash_mla.windows_a2_a3"]),
        ("A5", {"window": 256}, []),
        ("A3", {"num_heads": 48}, ["sparse_flash_mla.heads_a2_a3"]),
        ("A3", {"dtype": torch.float32}, ["sparse_flash_mla.half"]),
        ("A3", {"index_size": 64}, ["lightning_indexer.head_size", "compressor.combination"]),
        ("A5", {"layers": [DsaCompression(8, 512)]}, ["compressor.cmp_ratio"]),
        ("A5", {"layers": [DsaCompression(4)]}, ["compressor.combination"]),
    ],
)
def test_a_product_is_asked(profile: str, changes: dict[str, Any], parts: list[str]) -> None:
    shape, product = attrs.evolve(FLASH, **changes), profile_for(profile)
    if not parts:
        assert get_dsa_attn_kv_plan(shape, profile=product).groups
        return
    with pytest.raises(DsaKvPlanError) as raised:
        get_dsa_attn_kv_plan(shape, profile=product)
    found = [refusal.rule for refusal in raised.value.refusals]
    assert set(parts) <= set(found)
    assert len(found) == len({str(refusal) for refusal in raised.value.refusals})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    DeepseekV4Config(num_hidden_layers=7).save_pretrained(tmp_path)
    return tmp_path


def test_the_layers_are_those_of_hugging_face(config: Path, tmp_path: Path) -> None:
    """As written, from the older list of ratios, and from nothing but the pattern."""
    path = config / "config.json"
    data = json.loads(path.read_text())
    theirs = DeepseekV4Config(num_hidden_layers=7)
    ratios = {"sliding_attention": 0, **theirs.compress_rates}
    older = {**data, "compress_ratios": [*(ratios[kind] for kind in theirs.layer_types), 0]}
    bare = dict(data)
    del older["layer_types"], bare["layer_types"], bare["compress_rates"]
    for written in (data, older, bare):
        path.write_text(json.dumps(written))
        found = compressions(ModelConfig.load(config))
        assert [0 if one is None else one.ratio for one in found] == [
            ratios[kind] for kind in theirs.layer_types
        ]
        assert {one.top_k for one in found if one and one.overlap} == {theirs.index_topk}
    path.write_text(json.dumps({**data, "compress_rate_csa": 8}))
    assert DsaCompression(8, 512) in compressions(ModelConfig.load(config))


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["sliding_attention"] * 6},
        {"layer_types": ["full_attention"] * 7},
        {"layer_types": None, "compress_ratios": [0, 4, 128, 4, 4, 4, 5]},
        {"layer_types": None, "compress_ratios": "0"},
        {"compress_rates": {"compressed_sparse_attention": 1}},
        {"index_topk": 0},
    ],
)
def test_malformed_models_are_one_line(
    config: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelConfigError):
        compressions(ModelConfig.load(config))
    assert main(["kv-plan", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "allowed" in error


def test_command_prints_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kv-plan", "--config", str(config), "--profile", "A3", "--spec-tokens", "3"]
    assert main([*arguments, "--context", "8192,100000", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [entry["compress_ratio"] for entry in data["layers"]] == [128, 128, 128, 4, 128, 4, 128]
    shape = DsaModelShape(layers=compressions(ModelConfig.load(config)), num_heads=64)
    plan = get_dsa_attn_kv_plan(shape, DsaKvPlanOptions(num_spec_tokens=3))
    assert data["bytes_per_token"] == float(plan.bytes_per_token)
    assert [entry["tokens"] for entry in data["requests"]] == [8192, 100000]
    assert data["requests"][1]["bytes"] == plan.request_bytes(100000)
    assert data["groups"] == plan.as_dict()["groups"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.rstrip() == str(plan)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "compressed/4 2 4 128 512 128 512.0 all" in lines
    assert "5 compressed by 128" in lines


def test_command_refuses(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["kv-plan", "--config", str(config)]
    assert main([*arguments, "--block-size", "24", "--state-block-size", "7"]) == 1
    error = capsys.readouterr().err
    assert "block_size: found 24" in error
    assert "state_block_size: found 7" in error
    assert main([*arguments, "--profile", "A2"]) == 1
    assert "operator compressor is not supported" in capsys.readouterr().err
    Qwen3Config().save_pretrained(tmp_path / "qwen3")
    assert main(["kv-plan", "--config", str(tmp_path / "qwen3")]) == 2
    assert "found model_type 'qwen3'; allowed: deepseek_v4" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--context", "many"])
    assert stopped.value.code == 2
    assert "found 'many'" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kv-plan", "--help"])
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "exit codes:" in text


def test_the_table_of_the_readme_is_what_a_plan_prints() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    table = text[text.index("\ncache           layers") :].split("```")[0]
    lines = str(get_dsa_attn_kv_plan(FLASH, DsaKvPlanOptions(num_spec_tokens=3))).splitlines()
    assert len(table.split("\n")) > 10
    assert [line for line in table.splitlines() if line not in lines] == []

"""Property families (a), (b) and (d) for every backend of one rank, against their definitions.

``data/property_families.toml`` lists all families and where they are tested.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import Scenario, steps, visible
from draft_flash_support import run_draft
from fa3_support import run_fa3
from hypothesis import given
from hypothesis import strategies as st
from latent_support import LatentScenario
from sparse_oracle import SparseStep

from ascend_attn_backends import (
    PAD_SLOT,
    AscendAttentionMetadataBuilder,
    AscendFAMetadataBuilder,
    AscendFlashAttentionMetadataBuilder,
    AscendMLAMetadataBuilder,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    MaskMode,
    PlanCache,
)

TESTS = Path(__file__).parent
BUILDERS: dict[str, Callable[[], Any]] = {
    "standard": lambda: AscendAttentionMetadataBuilder(16),
    "mla": lambda: AscendMLAMetadataBuilder(16),
    "sfa": lambda: AscendSFAMetadataBuilder(16),
    "sfa_indexer": lambda: AscendSFAIndexerMetadataBuilder(16),
    "draft_flash": lambda: AscendFlashAttentionMetadataBuilder(16),
    "fa3": lambda: AscendFAMetadataBuilder(16),
}
BACKENDS = sorted(BUILDERS)


def starts_of(metadata: Any) -> list[int]:
    """``[num_reqs + 1]`` query starts, wherever a backend keeps them."""
    if hasattr(metadata, "launches"):
        return [0, *(end for launch in metadata.launches for end in launch.query_lens_cumulative)]
    if hasattr(metadata, "lengths"):
        return metadata.lengths.query_starts.tolist()
    if hasattr(metadata, "query_starts"):
        return metadata.query_starts.tolist()
    return [0, *metadata.query_ends.tolist()]


def keys_of(metadata: Any) -> list[int]:
    """``[num_reqs]`` keys of each request."""
    if hasattr(metadata, "launches"):
        return [keys for launch in metadata.launches for keys in launch.seq_lens]
    lens = metadata.lengths.seq_lens if hasattr(metadata, "lengths") else metadata.seq_lens
    return lens.tolist()


def table_of(metadata: Any) -> torch.Tensor:
    if hasattr(metadata, "launches"):
        return torch.cat([launch.block_table for launch in metadata.launches])
    return metadata.block_table


@given(
    st.sampled_from(BACKENDS),
    steps(),
    st.integers(0, 4),
    st.integers(0, 9),
    st.sampled_from([PAD_SLOT, -7]),
)
def test_family_a_rows_lengths_and_slots_of_any_padded_step(
    name: str, step: tuple[list[int], list[int]], more_rows: int, more_tokens: int, pad_slot: int
) -> None:
    """Starts monotone, the last is T, row counts agree, lengths >= 0, padding has pad slots."""
    plain = AttentionBatch.from_lengths(*step, 16)
    batch = plain.padded(plain.num_rows + more_rows, plain.num_token_rows + more_tokens)
    slots = batch.slot_mapping.clone()
    slots[batch.num_tokens :] = pad_slot
    metadata = BUILDERS[name]().build(attrs.evolve(batch, slot_mapping=slots))
    starts, keys = starts_of(metadata), keys_of(metadata)
    assert starts == sorted(starts) == plain.query_start_loc.tolist()
    assert starts[-1] == metadata.num_tokens == sum(step[0])
    assert len(starts) - 1 == len(keys) == len(table_of(metadata)) == metadata.num_reqs
    assert metadata.num_reqs == len(step[0])
    assert keys == step[1]
    assert min(keys) >= 0
    assert metadata.slot_mapping[: plain.num_tokens].tolist() == plain.slot_mapping.tolist()
    assert all(slot < 0 for slot in metadata.slot_mapping[plain.num_tokens :].tolist())


@given(
    st.sampled_from(BACKENDS),
    st.lists(st.integers(-5, 60), min_size=1, max_size=6),
    st.integers(0, 20),
    st.lists(st.integers(-5, 64), min_size=6, max_size=6),
)
def test_family_a_dirty_rows_never_break_the_rule(
    name: str, starts: list[int], tokens: int, keys: list[int]
) -> None:
    """What a runner left in its buffers: any starts, any key counts."""
    rows = len(starts)
    metadata = BUILDERS[name]().build(
        AttentionBatch(
            query_start_loc=torch.tensor([0, *starts], dtype=torch.int32),
            seq_lens=torch.tensor(keys[:rows], dtype=torch.int32),
            block_table=torch.zeros(rows, 4, dtype=torch.int32),
            slot_mapping=torch.full((tokens,), PAD_SLOT),
            num_reqs=rows,
            num_tokens=tokens,
            max_query_len=tokens,
            max_seq_len=64,
        )
    )
    found = starts_of(metadata)
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] <= tokens
    assert all(0 <= count <= 64 for count in keys_of(metadata))


def plain_data(value: Any) -> Any:
    """Everything in metadata as data; the mask template and the plans belong to no step."""
    if torch.is_tensor(value):
        return value.tolist()
    if attrs.has(type(value)):
        return {
            field.name: plain_data(getattr(value, field.name))
            for field in attrs.fields(type(value))
            if field.name != "causal_template"
            and not isinstance(getattr(value, field.name), PlanCache)
        }
    if isinstance(value, tuple):
        return [plain_data(item) for item in value]
    return value


class Runner:
    """Refills the same tensors for every step, host copies included, as engines do."""

    def __init__(self) -> None:
        self.starts, self.lens = (torch.zeros(n, dtype=torch.int32) for n in (4, 3))
        self.table = torch.zeros(3, 6, dtype=torch.int32)
        self.slots = torch.zeros(64, dtype=torch.int64)

    def batch(self, step: tuple[list[int], list[int]], seed: int) -> AttentionBatch:
        rows, tokens = len(step[0]), sum(step[0])
        table = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: rows * 6]
        fresh = AttentionBatch.from_lengths(
            *step, 16, block_table=table.view(rows, 6).to(torch.int32)
        )
        self.starts[: rows + 1].copy_(fresh.query_start_loc)
        self.lens[:rows].copy_(fresh.seq_lens)
        self.table[:rows].copy_(fresh.block_table)
        self.slots[:tokens].copy_(fresh.slot_mapping)
        return attrs.evolve(
            fresh,
            query_start_loc=self.starts[: rows + 1],
            query_start_loc_cpu=self.starts[: rows + 1],
            seq_lens=self.lens[:rows],
            seq_lens_cpu=self.lens[:rows],
            block_table=self.table[:rows],
            slot_mapping=self.slots[:tokens],
        )


@given(
    st.sampled_from(BACKENDS),
    st.lists(steps(max_reqs=3), min_size=2, max_size=5),
    st.integers(0, 99),
)
def test_family_b_building_all_steps_then_reading_one_equals_building_that_one(
    name: str, schedule: list[tuple[list[int], list[int]]], seed: int
) -> None:
    builder, runner = BUILDERS[name](), Runner()
    built = [builder.build(runner.batch(step, seed + i)) for i, step in enumerate(schedule)]
    for number, (metadata, step) in enumerate(zip(built, schedule, strict=True)):
        alone = BUILDERS[name]().build(Runner().batch(step, seed + number))
        assert plain_data(metadata) == plain_data(alone)


def test_family_b_control_a_step_that_aliases_its_batch_is_noticed() -> None:
    runner = Runner()
    first = runner.batch(([1], [5]), 0)
    before = plain_data(first)
    runner.batch(([1], [9]), 1)
    assert plain_data(first) != before


RUNS: dict[str, Callable[[Scenario], torch.Tensor]] = {
    "standard": lambda scenario: scenario.run(),
    "draft_flash": run_draft,
    "fa3": run_fa3,
}


@given(
    st.sampled_from(sorted(RUNS)),
    steps(max_reqs=3),
    st.none() | st.integers(1, 50),
    st.booleans(),
)
def test_family_d_the_mask_is_the_dense_definition(
    name: str, step: tuple[list[int], list[int]], window: int | None, causal: bool
) -> None:
    """Equal scores and one-hot values make each output row the mask row itself."""
    window = None if name == "fa3" else window
    scenario = Scenario(*step, head_size=64, heads=1, kv_heads=1, window=window, causal=causal)
    scenario.query.zero_()
    for row, length in enumerate(scenario.seq_lens):
        scenario.values[row] = torch.eye(64)[:length, None]
        for position in range(length - scenario.query_lens[row]):
            scenario.place(row, position)
    for row, out in enumerate(RUNS[name](scenario).split(scenario.query_lens)):
        mask = visible(len(out), scenario.seq_lens[row], causal=causal, window=window)
        assert torch.equal(out[:, 0, : mask.shape[1]] > 0, mask)


@given(steps(max_reqs=3), st.booleans())
def test_family_d_the_mask_of_latent_attention_is_the_dense_definition(
    step: tuple[list[int], list[int]], causal: bool
) -> None:
    scenario = LatentScenario(*step, heads=1, causal=causal)
    scenario.q_nope.zero_()
    scenario.q_pe.zero_()
    scenario.latents = [torch.eye(512)[:length] for length in scenario.seq_lens]
    for row, out in enumerate(scenario.run().split(scenario.query_lens)):
        mask = visible(len(out), scenario.seq_lens[row], causal=causal, window=None)
        assert torch.equal(out[:, 0, : mask.shape[1]] > 0, mask)


@given(steps(max_reqs=3), st.booleans())
def test_family_d_an_indexer_that_takes_all_keys_chooses_the_mask(
    step: tuple[list[int], list[int]], causal: bool
) -> None:
    """And sparse attention over that choice is attention under the mask."""
    scenario = SparseStep(*step, top_k=64, causal=causal)
    chosen, _ = scenario.run()
    token = 0
    for row, count in enumerate(scenario.query_lens):
        mask = visible(count, scenario.seq_lens[row], causal=causal, window=None)
        for line in mask:
            keys = [key for key in chosen[token, 0].tolist() if key >= 0]
            assert sorted(keys) == line.nonzero().flatten().tolist()
            token += 1


@given(st.integers(1, 9), st.integers(0, 40), st.none() | st.integers(1, 50), st.booleans())
def test_family_d_mask_modes_are_the_dense_definition(
    query_len: int, computed: int, window: int | None, causal: bool
) -> None:
    """The arguments alone, read as the operator's documents say."""
    mode, kv_len = MaskMode.for_window(window, causal=causal), query_len + computed
    own = torch.arange(query_len)[:, None] + computed
    keys = torch.arange(kv_len)
    seen = torch.ones(query_len, kv_len, dtype=torch.bool)
    if mode.sparse_mode == 3:
        seen = keys <= own
    elif mode.sparse_mode == 4:
        seen = (keys >= own - mode.pre_tokens) & (keys <= own + mode.next_tokens)
    assert torch.equal(seen, visible(query_len, kv_len, causal=causal, window=window))


FAMILIES: list[dict[str, Any]] = tomllib.loads(
    (TESTS / "data" / "property_families.toml").read_text("utf-8")
)["family"]


def property_tests(path: Path) -> set[str]:
    """Tests of a file that run on drawn examples, so that a longer profile runs more of them."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any("given(" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


@pytest.mark.parametrize("family", FAMILIES, ids=[family["id"] for family in FAMILIES])
def test_every_family_names_property_tests(family: dict[str, Any]) -> None:
    assert family["property"]
    if "layer" in family:
        assert len(family["reason"]) > 20
        return
    for name in family["tests"]:
        file, _, test = name.partition("::")
        assert test in property_tests(TESTS / file), name


def test_all_five_families_are_listed() -> None:
    assert [family["id"] for family in FAMILIES] == ["a", "b", "c", "d", "e"]


def test_control_a_test_without_examples_is_no_property_test() -> None:
    assert "test_all_five_families_are_listed" not in property_tests(Path(__file__))

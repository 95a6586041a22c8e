"""Plans: one per geometry and step, dropped with the step, refused for other calls."""

from __future__ import annotations

import gc
import threading
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import Scenario, steps
from draft_flash_support import device_only, layer_of, run_draft, run_layer
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendFlashAttentionImpl,
    AscendFlashAttentionMetadata,
    AscendFlashAttentionMetadataBuilder,
    AttentionBatch,
    PlanCache,
    PlanGeometry,
    PlanMismatchError,
    StepLengths,
    draft_step,
    require_fitting_plan,
)
from ascend_attn_ops import FlashAttnArguments, FlashAttnPlan, flash_attn_metadata, use_profile

GEOMETRY = PlanGeometry(
    num_heads=4, num_kv_heads=2, head_size=64, mask_mode=4, win_left=7, win_right=0,
    layout_kv="PA_BBND", max_query_len=8, max_seq_len=64,
)  # fmt: skip
OTHER: dict[str, Any] = {
    "num_heads": 8, "num_kv_heads": 1, "head_size": 128, "mask_mode": 0, "win_left": 8,
    "win_right": 1, "layout_kv": "PA_BNBD", "max_query_len": 9, "max_seq_len": 65,
}  # fmt: skip


def lengths(starts: tuple[int, ...] = (0, 3, 8), keys: tuple[int, ...] = (20, 40)) -> StepLengths:
    return StepLengths(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
    )


def geometry_with(field: str) -> PlanGeometry:
    changes = {field: OTHER[field]}
    if field == "mask_mode":
        changes |= {"win_left": -1, "win_right": -1}
    return attrs.evolve(GEOMETRY, **changes)


def call_for(step: StepLengths, geometry: PlanGeometry) -> FlashAttnArguments:
    """A flash_attn call of this geometry over these lengths."""
    blocks = (4, 16, geometry.num_kv_heads, geometry.head_size)
    if geometry.layout_kv == "PA_BNBD":
        blocks = (4, geometry.num_kv_heads, 16, geometry.head_size)
    cache = torch.zeros(blocks)
    return FlashAttnArguments(
        q=torch.zeros(8, geometry.num_heads, geometry.head_size),
        k=cache,
        v=cache,
        block_table=torch.zeros(len(step.seq_lens), 4, dtype=torch.int32),
        cu_seqlens_q=step.query_starts,
        seqused_kv=step.seq_lens,
        mask_mode=geometry.mask_mode,
        win_left=geometry.win_left,
        win_right=geometry.win_right,
        max_seqlen_q=geometry.max_query_len,
        max_seqlen_kv=geometry.max_seq_len,
        layout_q="TND",
        layout_kv=geometry.layout_kv,
        layout_out="TND",
    )


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("layers", [1, 5, 40])
def test_plans_of_a_step_are_its_geometries(layers: int, k: int) -> None:
    scenario = Scenario([k + 1] * 3, [40, k + 1, 90], head_size=64, causal=False)
    builder = AscendFlashAttentionMetadataBuilder(16)
    metadata = builder.build(device_only(scenario.batch()))
    for _ in range(layers):
        run_layer(scenario, metadata, scenario.batch().num_tokens)
    assert (builder.plans.builds, builder.plans.hits) == (1, layers - 1)
    for window in (8, 16):
        scenario.window = window
        for _ in range(layers):
            run_layer(scenario, metadata, scenario.batch().num_tokens)
    assert (builder.plans.builds, builder.plans.hits) == (3, 3 * (layers - 1))


def test_every_step_has_plans_of_its_own() -> None:
    scenario = Scenario([1, 1], [20, 9], head_size=64)
    builder = AscendFlashAttentionMetadataBuilder(16)
    for count in (1, 2, 3):
        run_draft(scenario, builder=builder)
        assert (builder.plans.builds, builder.plans.hits) == (count, 0)


@pytest.mark.parametrize("field", OTHER)
def test_another_geometry_never_shares(field: str) -> None:
    cache, step = PlanCache(), lengths()
    first = cache.plan(step, GEOMETRY)
    assert cache.plan(step, attrs.evolve(GEOMETRY)) is first
    other = geometry_with(field)
    assert cache.plan(step, other) is not first
    assert (cache.builds, cache.hits, len(cache)) == (2, 1, 2)


def test_every_field_of_the_geometry_is_tested() -> None:
    assert set(OTHER) == {field.name for field in attrs.fields(PlanGeometry)}


@pytest.mark.parametrize("field", OTHER)
def test_a_plan_of_another_geometry_is_refused(field: str) -> None:
    step = lengths()
    plan = PlanCache().plan(step, geometry_with(field))
    with pytest.raises(PlanMismatchError) as raised:
        require_fitting_plan(plan, call_for(step, GEOMETRY))
    assert raised.value.refusals
    assert "the plan belongs to another flash_attn call" in str(raised.value)
    require_fitting_plan(PlanCache().plan(step, GEOMETRY), call_for(step, GEOMETRY))


@pytest.mark.parametrize(
    ("other", "parameter"),
    [
        (lengths(starts=(0, 4, 8)), "cu_seqlens_q"),
        (lengths(keys=(20, 41)), "seqused_kv"),
        (lengths(starts=(0, 3, 5, 8), keys=(20, 40, 1)), "requests"),
    ],
)
def test_a_plan_of_other_lengths_is_refused(other: StepLengths, parameter: str) -> None:
    plan = PlanCache().plan(lengths(), GEOMETRY)
    with pytest.raises(PlanMismatchError, match=parameter):
        require_fitting_plan(plan, call_for(other, GEOMETRY))


@pytest.mark.parametrize("field", ["query_starts", "seq_lens"])
def test_lengths_that_change_after_the_plan_are_refused_by_the_layer(field: str) -> None:
    scenario = Scenario([3, 1], [20, 9], head_size=64)
    metadata = AscendFlashAttentionMetadataBuilder(16).build(device_only(scenario.batch()))
    run_layer(scenario, metadata, 4)
    getattr(metadata.lengths, field)[1] -= 1
    with pytest.raises(PlanMismatchError):
        run_layer(scenario, metadata, 4)


class Mistaken(PlanCache):
    """Hands out the plan of the first call, whatever is asked."""

    first: FlashAttnPlan | None = None

    def plan(self, lengths: StepLengths, geometry: PlanGeometry) -> FlashAttnPlan:
        if self.first is None:
            self.first = super().plan(lengths, geometry)
        return self.first


def test_a_layer_refuses_what_a_mistaken_cache_hands_out() -> None:
    scenario = Scenario([3, 1], [20, 9], head_size=64)
    builder = AscendFlashAttentionMetadataBuilder(16, plans=Mistaken())
    metadata = builder.build(device_only(scenario.batch()))
    run_layer(scenario, metadata, 4)
    scenario.window = 5
    with pytest.raises(PlanMismatchError, match="mask_mode: found 4; allowed: 3"):
        run_layer(scenario, metadata, 4)


def test_plans_equal_those_of_the_operator() -> None:
    step = lengths()
    plan = PlanCache().plan(step, GEOMETRY)
    expected = flash_attn_metadata(
        4, 2, 64, cu_seqlens_q=step.query_starts, seqused_kv=step.seq_lens, max_seqlen_q=8,
        max_seqlen_kv=64, mask_mode=4, win_left=7, win_right=0, layout_q="TND",
        layout_kv="PA_BBND", layout_out="TND",
    )  # fmt: skip
    assert torch.equal(plan.metadata, expected)


def test_core_counts_are_part_of_the_key() -> None:
    cache, step = PlanCache(), lengths()
    with use_profile("Ascend950DT_9572"):
        small = cache.plan(step, GEOMETRY)
    with use_profile("A5"):
        large = cache.plan(step, GEOMETRY)
    assert small.metadata[4:6].tolist() == [28, 56]
    assert large.metadata[4:6].tolist() == [36, 72]
    assert cache.builds == 2


def test_the_cache_is_bounded_and_forgets_the_oldest_use() -> None:
    cache, step = PlanCache(max_plans=2), lengths()
    windows = [attrs.evolve(GEOMETRY, win_left=left) for left in (1, 2, 3)]
    cache.plan(step, windows[0])
    cache.plan(step, windows[1])
    cache.plan(step, windows[0])
    cache.plan(step, windows[2])
    assert (len(cache), cache.evictions, cache.builds) == (2, 1, 3)
    cache.plan(step, windows[0])
    assert (cache.builds, cache.hits) == (3, 2)
    cache.plan(step, windows[1])
    assert cache.builds == 4
    cache.clear()
    assert (len(cache), cache.builds) == (0, 4)
    with pytest.raises(ValueError, match="max_plans: found 0; allowed: at least 1"):
        PlanCache(0)


def test_plans_go_when_their_step_goes() -> None:
    cache = PlanCache()
    kept, gone = lengths(), lengths()
    for step in (kept, gone):
        cache.plan(step, GEOMETRY)
        cache.plan(step, attrs.evolve(GEOMETRY, win_left=3))
    del gone, step
    gc.collect()
    assert len(cache) == 2
    cache.plan(kept, GEOMETRY)
    assert cache.hits == 1


def test_new_lengths_never_meet_the_plan_of_old_ones() -> None:
    """A dropped object's id may be given to the next one."""
    cache = PlanCache()
    for keys in range(1, 60):
        step = lengths(keys=(keys, 40))
        plan = cache.plan(step, GEOMETRY)
        require_fitting_plan(plan, call_for(step, GEOMETRY))
        del step
    assert (cache.builds, cache.hits) == (59, 0)


def test_threads_share_one_build() -> None:
    cache, step, plans = PlanCache(), lengths(), []
    threads = [
        threading.Thread(target=lambda: plans.append(cache.plan(step, GEOMETRY))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len({id(plan) for plan in plans}) == 1
    assert (cache.builds, cache.hits) == (1, 7)


def contents(metadata: AscendFlashAttentionMetadata) -> list[Any]:
    step = metadata.lengths
    return [
        metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len, metadata.causal,
        step.query_starts.tolist(), step.seq_lens.tolist(), metadata.block_table.tolist(),
        metadata.slot_mapping.tolist(),
    ]  # fmt: skip


@given(st.lists(steps(max_reqs=4), min_size=2, max_size=5))
def test_building_all_steps_then_reading_one_equals_building_that_one(
    schedule: list[tuple[list[int], list[int]]],
) -> None:
    """All steps go through one set of device buffers, refilled in place for each step."""
    builder = AscendFlashAttentionMetadataBuilder(16)
    buffers = AttentionBatch.from_lengths([9] * 4, [64] * 4, 16)

    def through_buffers(step: tuple[list[int], list[int]]) -> AttentionBatch:
        batch, changes = AttentionBatch.from_lengths(*step, 16), {}
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table"):
            value = getattr(batch, name)
            view = getattr(buffers, name)[tuple(slice(0, size) for size in value.shape)]
            changes[name] = view.copy_(value)
        return device_only(attrs.evolve(batch, **changes))

    built = [builder.build(through_buffers(step)) for step in schedule]
    plans = [builder.plans.plan(metadata.lengths, GEOMETRY).metadata.clone() for metadata in built]
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table"):
        getattr(buffers, name).fill_(0)
    for step, metadata, plan in zip(schedule, built, plans, strict=True):
        alone = builder.build(AttentionBatch.from_lengths(*step, 16))
        assert contents(metadata) == contents(alone)
        assert torch.equal(builder.plans.plan(alone.lengths, GEOMETRY).metadata, plan)


def forward_on_meta(batch: AttentionBatch, **build: Any) -> torch.Tensor:
    """Build and run a layer where no value can be read at all."""
    builder = AscendFlashAttentionMetadataBuilder(16)
    metadata = builder.build(batch, **build)
    layer = AscendFlashAttentionImpl(4, 64, 0.125, 2, sliding_window=9)
    caches = [torch.empty(12, 16, 2, 64, device="meta").transpose(1, 2) for _ in range(2)]
    rows = torch.empty(batch.num_token_rows, 2, 64, device="meta")
    layer.write_kv(rows, rows, *caches, metadata.slot_mapping)
    query = torch.empty(batch.num_token_rows, 4, 64, device="meta")
    output = layer.forward(query, *caches, metadata, torch.empty_like(query))
    layer.forward(query, *caches, metadata, torch.empty_like(query))
    assert (builder.plans.builds, builder.plans.hits) == (1, 1)
    return output


def test_no_length_is_read_on_any_path() -> None:
    """On the meta device every read of a value raises."""
    verified = device_only(AttentionBatch.from_lengths([4, 4], [50, 20], 16, device="meta"))
    assert forward_on_meta(verified).shape == (8, 4, 64)
    gone = torch.empty(2, dtype=torch.int32, device="meta")
    assert forward_on_meta(verified, num_rejected=gone).shape == (8, 4, 64)
    for offset in range(3):
        step = draft_step(
            verified, gone, offset=offset, query_len=1, block_size=16, max_model_len=64
        )
        out = forward_on_meta(step.batch, num_rejected=step.num_unused)
        assert out.shape == (2, 4, 64)


def test_control_reading_a_length_there_raises() -> None:
    batch = AttentionBatch.from_lengths([4, 4], [50, 20], 16, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        batch.seq_lens.tolist()
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        device_only(batch).host_seq_lens()


def test_metadata_is_frozen_and_shares_no_memory_with_the_batch() -> None:
    batch = Scenario([2, 3], [20, 30]).batch()
    metadata = AscendFlashAttentionMetadataBuilder(16).build(batch)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        metadata.num_tokens = 1  # type: ignore[misc]
    ours = [metadata.slot_mapping, metadata.block_table, metadata.lengths.query_starts,
            metadata.lengths.seq_lens]  # fmt: skip
    theirs = [v for v in attrs.asdict(batch, recurse=False).values() if torch.is_tensor(v)]
    storages = {t.untyped_storage().data_ptr() for t in theirs}
    assert not storages & {t.untyped_storage().data_ptr() for t in ours}


def test_layer_geometry_names_the_mask() -> None:
    scenario = Scenario([1], [5], head_size=64)
    builder = AscendFlashAttentionMetadataBuilder(16)
    found = {}
    for window in (None, 4):
        for causal in (True, False):
            scenario.window = window
            g = layer_of(scenario).geometry(builder.build(scenario.batch(causal=causal)))
            found[window, causal] = (g.mask_mode, g.win_left, g.win_right)
    assert found == {
        (None, True): (3, -1, -1),
        (None, False): (0, -1, -1),
        (4, True): (4, 3, 0),
        (4, False): (4, 3, 3),
    }

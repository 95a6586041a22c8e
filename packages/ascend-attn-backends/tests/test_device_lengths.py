"""Steps whose key counts the host does not know: bounds on the host, lengths on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import TOLERANCES, Scenario, steps
from hypothesis import given
from hypothesis import strategies as st
from latent_support import LatentScenario

from ascend_attn_backends import (
    AscendAttentionMetadataBuilder,
    AscendMLAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    AttentionMaskBuilder,
    ContextShard,
    TokenSegment,
    per_token_batch,
    segment_batch,
)
from ascend_attn_backends.mla import all_keys
from ascend_attn_backends.standard import token_step

BUILDERS = (AscendAttentionMetadataBuilder, AscendMLAMetadataBuilder)
DRAFTS = st.lists(st.integers(0, 4), min_size=5, max_size=5)


def bounded(
    batch: AttentionBatch, drafts: Sequence[int] = (2, 0, 1, 4, 3), *, starts: bool = True
) -> AttentionBatch:
    """The batch when the host knows bounds, so many keys too high, and maybe the query starts.

    Where a request is prefilling the bound is exact, as vLLM's.
    """
    assert batch.seq_lens_cpu is not None
    more = torch.tensor([*drafts, *[0] * batch.num_rows][: batch.num_rows], dtype=torch.int32)
    if batch.is_prefilling is not None:
        more.masked_fill_(batch.is_prefilling, 0)
    known = batch.query_start_loc_cpu if starts else None
    return attrs.evolve(
        batch,
        query_start_loc_cpu=known,
        seq_lens_cpu=None,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu + more,
        causal_cpu=None,
    )


def unread(builder: Any, batch: AttentionBatch) -> Any:
    """Metadata of a batch whose tensors have no values: reading one raises."""
    fields = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "causal")
    tensors = {
        name: value.to("meta")
        for name in fields
        if isinstance(value := getattr(batch, name), torch.Tensor)
    }
    on_meta = attrs.evolve(batch, **tensors)
    return attrs.evolve(builder(16), masks=AttentionMaskBuilder()).build(on_meta)


@given(
    steps(),
    DRAFTS,
    st.sampled_from([16, 128]),
    st.sampled_from(sorted(TOLERANCES, key=str)),
    st.none() | st.integers(1, 30),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.none() | st.lists(st.booleans(), min_size=5, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_dense_attention_equals_the_formula(
    step: tuple[list[int], list[int]],
    drafts: list[int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    causal: list[bool],
    prefilling: list[bool] | None,
    starts: bool,
    token_major: bool,
) -> None:
    scenario = Scenario(
        *step, block_size=block_size, dtype=dtype, window=window,
        causal=causal[: len(step[0])], token_major=token_major,
    )  # fmt: skip
    flags = None if prefilling is None else prefilling[: len(step[0])]
    batch = scenario.batch(is_prefilling=flags).padded(len(step[0]) + 1, sum(step[0]) + 2)
    scenario.block_table = batch.block_table
    output = scenario.run(bounded(batch, drafts, starts=starts))
    scenario.compare(output)
    assert not output[sum(step[0]) :].any()


@given(
    steps(),
    DRAFTS,
    st.sampled_from([16, 128]),
    st.booleans(),
    st.none() | st.lists(st.booleans(), min_size=5, max_size=5),
    st.booleans(),
)
def test_latent_attention_equals_the_formula(
    step: tuple[list[int], list[int]],
    drafts: list[int],
    block_size: int,
    causal: bool,
    prefilling: list[bool] | None,
    starts: bool,
) -> None:
    scenario = LatentScenario(*step, block_size=block_size, causal=causal)
    whole = scenario.batch()
    if prefilling is not None:
        flags = torch.tensor(prefilling[: len(step[0])])
        whole = attrs.evolve(whole, is_prefilling=flags)
    batch = bounded(whole, drafts, starts=starts)
    impl, caches, metadata = scenario.prepared(batch)
    every_length_is_known = starts and prefilling is not None and all(flags)
    assert (metadata.all_keys is None) is bool(every_length_is_known)
    expected, lse = scenario.expected()
    output, near = torch.full_like(scenario.q_nope, math.nan), TOLERANCES[torch.float32]
    queries = (scenario.q_nope, scenario.q_pe)
    assert impl.forward_mqa(*queries, *caches, metadata, output) is output
    torch.testing.assert_close(output.double(), expected, **near)
    part = impl.forward_mqa_partial(*queries, *caches, metadata)
    assert torch.equal(part.out, output)
    torch.testing.assert_close(part.lse.double(), lse, **near)


def test_control_bounds_are_not_lengths() -> None:
    """Whoever took the bounds for the lengths would be found out, by both oracles."""
    dense = Scenario([1, 3], [20, 9])
    lens = torch.tensor([22, 9], dtype=torch.int32)
    wrong = attrs.evolve(dense.batch(), seq_lens=lens, seq_lens_cpu=lens)
    with pytest.raises(AssertionError, match="not close"):
        dense.compare(dense.run(wrong))
    latent = LatentScenario([1, 3], [20, 9])
    swapped = attrs.evolve(bounded(latent.batch()), seq_lens=lens)
    assert not torch.allclose(latent.run(swapped).double(), latent.expected()[0], atol=1e-3)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("starts", [True, False])
def test_no_device_tensor_is_read(builder: Any, starts: bool) -> None:
    batch = AttentionBatch.from_lengths([4, 1, 3], [20, 9, 33], 16)
    metadata = unread(builder, bounded(batch, starts=starts))
    assert metadata.launches == ()
    assert metadata.max_seq_len == 34
    metadata = unread(builder, batch)  # exact host lengths are used where they are
    assert [launch.seq_lens for launch in metadata.launches] == [(20, 9, 33)]


@pytest.mark.parametrize("builder", BUILDERS)
def test_prompts_beside_open_requests_have_their_known_lengths(builder: Any) -> None:
    """A mixed step: calls over the prompts, and the open tokens by themselves; nothing is read."""
    flags = [False, True, False, True]
    batch = AttentionBatch.from_lengths([1, 40, 3, 20], [31, 40, 12, 25], 16, is_prefilling=flags)
    metadata = unread(builder, bounded(batch))
    (launch,) = metadata.launches
    assert launch.seq_lens == (40, 25)
    assert launch.query_lens_cumulative == (40, 60)
    opened = getattr(metadata, "all_keys", None) or metadata.token_step
    assert opened.num_tokens == 4
    prompts = unread(builder, bounded(attrs.evolve(batch, is_prefilling=torch.ones(4).bool())))
    assert (prompts.token_step, getattr(prompts, "all_keys", None)) == (None, None)
    assert [call.seq_lens for call in prompts.launches] == [(31, 40, 12, 25)]


def test_a_mixed_step_equals_the_formula() -> None:
    lens, flags = ([1, 40, 3, 20], [31, 40, 12, 25]), [False, True, False, True]
    for window in (None, 6):
        for causal in (True, [True, False, False, True]):
            scenario = Scenario(*lens, window=window, causal=causal)
            scenario.compare(scenario.run(bounded(scenario.batch(is_prefilling=flags))))
    latent = LatentScenario(*lens)
    batch = attrs.evolve(latent.batch(), is_prefilling=torch.tensor(flags))
    near = TOLERANCES[torch.float32]
    torch.testing.assert_close(latent.run(bounded(batch)).double(), latent.expected()[0], **near)


LARGE = {
    "without bounds": ([8], {"seq_lens_cpu_upper_bound": None}, 1 << 26),
    "with a prompt": ([17], {}, 1 << 26),
    "with too many keys": ([8], {}, 100),
}


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("name", LARGE)
def test_control_other_steps_are_read(
    builder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query_lens, changes, most = LARGE[name]
    monkeypatch.setattr(token_step, "MOST_MASKED_KEYS", most)
    monkeypatch.setattr(all_keys, "MOST_CHOSEN_KEYS", most)
    batch = attrs.evolve(bounded(AttentionBatch.from_lengths(query_lens, [33], 16)), **changes)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        unread(builder, batch)
    assert len(builder(16).build(batch).launches) == 1
    longest = bounded(AttentionBatch.from_lengths([16], [33], 16))
    assert name == "with too many keys" or builder(16).build(longest).launches == ()


def test_blocks_that_one_token_cannot_have_are_read_with_host_lengths() -> None:
    scenario = Scenario([1, 2], [40, 9], block_size=1024)
    metadata = scenario.build(bounded(scenario.batch()))
    assert metadata.token_step is None
    scenario.compare(scenario.run(bounded(scenario.batch())))


def test_tokens_without_keys_are_zero() -> None:
    """Tokens of no request, of an emptied one, and before the first key of a short one."""
    scenario = Scenario([2, 3, 1], [2, 3, 7])
    scenario.run()
    lens = torch.tensor([0, 1, 7], dtype=torch.int32)
    starts = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    batch = attrs.evolve(
        bounded(scenario.batch(), starts=False), seq_lens=lens, query_start_loc=starts
    )
    output = torch.full_like(scenario.query, math.nan)
    caches = (scenario.key_cache, scenario.value_cache)
    scenario.impl().forward(scenario.query, *caches, scenario.build(batch), output)
    assert output.isfinite().all()
    assert [bool(row.any()) for row in output] == [False, False, False, False, True, False]


def test_layers_share_the_mask_of_a_window_and_no_other() -> None:
    metadata = AscendAttentionMetadataBuilder(16).build(
        bounded(AttentionBatch.from_lengths([2, 1], [20, 9], 16))
    )
    assert metadata.token_step is not None
    mask = metadata.token_step.mask
    assert mask(None) is mask(None)
    assert mask(5) is mask(5)
    assert (mask(5).hidden.sum((1, 2, 3)) == 32 - 5).all()
    assert mask(None).hidden.sum((1, 2, 3)).tolist() == [32 - 19, 32 - 20, 32 - 9]


def test_block_ids_behind_a_requests_keys_are_not_used() -> None:
    """They may be stale; with bounds on the host the operator would follow them."""
    scenario = Scenario([1, 1], [17, 40])
    scenario.block_table[0, 2] = 1 << 30
    scenario.compare(scenario.run(bounded(scenario.batch(), (15, 0))))


def test_bounds_go_with_their_requests() -> None:
    batch = bounded(AttentionBatch.from_lengths([4, 1], [20, 9], 16), (2, 5))
    wide = batch.padded(4, 8).seq_lens_cpu_upper_bound
    assert wide is not None
    assert wide.tolist() == [22, 14, 0, 0]
    parts = segment_batch(batch, [TokenSegment(1, 0, 1), TokenSegment(0, 0, 3)])
    assert parts.seq_lens.tolist() == [9, 19]
    assert parts.seq_lens_cpu_upper_bound is not None
    assert parts.seq_lens_cpu_upper_bound.tolist() == [14, 21]
    assert per_token_batch(batch, ContextShard(rank=0, size=2)).seq_lens_cpu_upper_bound is None


def test_bounds_that_do_not_fit_are_named() -> None:
    batch = AttentionBatch.from_lengths([4, 1], [20, 9], 16)
    with pytest.raises(AttentionBatchError, match=r"seq_lens_cpu_upper_bound.*\[2\]"):
        attrs.evolve(batch, seq_lens_cpu_upper_bound=torch.tensor([20], dtype=torch.int32))
    low = attrs.evolve(batch, seq_lens_cpu_upper_bound=torch.tensor([20, 8], dtype=torch.int32))
    with pytest.raises(AttentionBatchError, match=r"upper_bound\[1\].*8.*at least the 9 keys"):
        low.validate()
    high = attrs.evolve(
        batch,
        seq_lens_cpu_upper_bound=torch.tensor([21, 9], dtype=torch.int32),
        is_prefilling=torch.tensor([True, False]),
    )
    with pytest.raises(AttentionBatchError, match=r"bound\[0\].*21.*the 20 keys.*prefilling"):
        high.validate()
    attrs.evolve(high, is_prefilling=None).validate()

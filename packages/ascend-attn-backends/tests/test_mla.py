"""The latent backend against a float64 formula, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import TOLERANCES, steps
from hypothesis import given
from hypothesis import strategies as st
from latent_support import SCALE, LatentScenario, PoisonedMLAImpl

import ascend_attn_ops
from ascend_attn_backends import (
    AscendMLABackend,
    AscendMLAImpl,
    AscendMLAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    BackendRequest,
    InvalidFieldError,
    cache_bytes_per_token,
    get_attn_backend_cls,
    select_backend,
)
from ascend_attn_ops import use_provider
from ascend_hwprofile import profile_for

DEEPSEEK = BackendRequest(
    use_mla=True, head_size=576, num_heads=128, num_kv_heads=1, dtype=torch.bfloat16
)


@given(
    steps(),
    st.sampled_from([16, 128]),
    st.sampled_from(sorted(TOLERANCES, key=str)),
    st.booleans(),
    st.integers(0, 3),
)
def test_equals_the_formula(
    step: tuple[list[int], list[int]],
    block_size: int,
    dtype: torch.dtype,
    causal: bool,
    padding: int,
) -> None:
    flags = [causal, *[True] * (len(step[0]) - 1)]
    scenario = LatentScenario(*step, block_size=block_size, dtype=dtype, causal=flags)
    batch = scenario.batch()
    batch = batch.padded(batch.num_rows + padding, batch.num_token_rows + 2 * padding)
    output, (expected, lse) = scenario.run(batch), scenario.expected()
    torch.testing.assert_close(output[: len(expected)].double(), expected, **TOLERANCES[dtype])
    assert torch.equal(output[len(expected) :], torch.zeros_like(output[len(expected) :]))
    impl, caches, metadata = scenario.prepared(batch)
    part = impl.forward_mqa_partial(scenario.q_nope, scenario.q_pe, *caches, metadata)
    assert torch.equal(part.out, output[: len(expected)])
    torch.testing.assert_close(part.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_control_a_swapped_token_differs() -> None:
    scenario = LatentScenario([3, 1], [20, 9])
    output = scenario.run()
    scenario.latents[0][[2, 3]] = scenario.latents[0][[3, 2]]
    assert not torch.allclose(output.double(), scenario.expected()[0], **TOLERANCES[torch.float32])


@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_case_37_rows_without_keys_are_masked_by_length(provider: str) -> None:
    """vllm 49294: they came back with a finite lse and NaN; the length decides, not the value."""
    scenario = LatentScenario([2, 1], [2, 5])
    impl, caches, _ = scenario.prepared(scenario.batch())
    lens = torch.tensor([0, 5], dtype=torch.int32)
    batch = attrs.evolve(scenario.batch(), seq_lens=lens, seq_lens_cpu=lens)
    metadata = scenario.build(batch)
    queries, output = (scenario.q_nope, scenario.q_pe), torch.full((3, 4, 512), math.nan)
    poisoned = PoisonedMLAImpl(scenario.heads, SCALE)
    with use_provider(provider):
        part = impl.forward_mqa_partial(*queries, *caches, metadata)
        impl.forward_mqa(*queries, *caches, metadata, output)
        again = poisoned.forward_mqa_partial(*queries, *caches, metadata)
        written = poisoned.forward_mqa(*queries, *caches, metadata, torch.empty_like(output))
    assert torch.equal(part.out[:2], torch.zeros(2, 4, 512))
    assert part.lse[:2].isneginf().all()
    assert torch.equal(again.lse, part.lse)
    for same in (output, again.out, written):
        assert torch.equal(same, part.out)


def test_case_12_trailing_speculative_blocks_keep_their_columns() -> None:
    """vllm-ascend 11466: rows were as wide as the content alone."""
    table = torch.arange(10, dtype=torch.int32)[None]
    batch = AttentionBatch.from_lengths([3], [1024 + 256], 128, block_table=table)
    builder = AscendMLAMetadataBuilder(128)
    assert builder.build(batch).launches[0].block_table.tolist() == table.tolist()
    narrow = attrs.evolve(batch, block_table=table[:, :8])
    with pytest.raises(AttentionBatchError, match="8 columns; allowed: at least 10"):
        builder.build(narrow)


def test_building_reads_nothing_from_the_device_and_aliases_nothing() -> None:
    scenario = LatentScenario([2, 3], [20, 30])
    batch = scenario.batch()
    expected = scenario.run(batch)
    wrong = {
        name: torch.zeros_like(getattr(batch, name)) for name in ("query_start_loc", "seq_lens")
    }
    assert torch.equal(scenario.run(attrs.evolve(batch, **wrong)), expected)
    impl, caches, metadata = scenario.prepared(batch)
    batch.block_table.zero_()
    batch.slot_mapping.zero_()
    output = torch.empty_like(scenario.q_nope)
    impl.forward_mqa(scenario.q_nope, scenario.q_pe, *caches, metadata, output)
    assert torch.equal(output, expected)


SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "q_nope": (0, (3, 4, 128)),
    "q_pe": (1, (3, 4, 32)),
    "latent_cache": (2, (3, 1, 8, 512)),
    "rope_cache": (3, (3, 1, 16, 32)),
    "output": (5, (2, 4, 512)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shapes_are_named(name: str) -> None:
    scenario = LatentScenario([3], [20])
    impl, caches, metadata = scenario.prepared(scenario.batch())
    arguments: list[Any] = [scenario.q_nope, scenario.q_pe, *caches, metadata]
    arguments.append(torch.empty_like(scenario.q_nope))
    place, shape = SHAPES[name]
    arguments[place] = torch.zeros(shape)
    with pytest.raises(InvalidFieldError, match=name):
        impl.forward_mqa(*arguments)


@pytest.mark.parametrize("name", ["num_heads", "latent_size", "rope_size"])
def test_impossible_layers_are_named(name: str) -> None:
    with pytest.raises(InvalidFieldError, match=name):
        AscendMLAImpl(**{"num_heads": 1, "scale": 1.0, name: 0})


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "mla.use_sparse": ({"use_sparse": True}, "False"),
    "mla.use_mla": ({"use_mla": False}, "True"),
    "mla.sliding_window": ({"sliding_window": 128}, "None"),
    "mla.has_sinks": ({"has_sinks": True}, "False"),
    "mla.context_parallel_size": ({"context_parallel_size": 2}, "1"),
    "mla.kv_cache_dtype": ({"kv_cache_dtype": "int8"}, "auto or bfloat16"),
    "fused_infer_attention_score.mla_heads": ({"num_heads": 96}, "N of"),
    "fused_infer_attention_score.block_size_limits": ({"block_size": 24}, ""),
    "fused_infer_attention_score.mla_head_size": ({"head_size": 320}, "a head size of"),
}


@pytest.mark.parametrize("rule", REFUSED)
@pytest.mark.parametrize("family", ["A2", "A5"])
def test_what_it_refuses(rule: str, family: str) -> None:
    change, allowed = REFUSED[rule]
    request = attrs.evolve(DEEPSEEK, **change)
    refusals = AscendMLABackend.refusals(request, profile_for(family))
    (refusal,) = [entry for entry in refusals if entry.rule == rule]
    assert refusal.allowed.startswith(allowed)
    assert refusal.source


def test_310p_has_no_operator_for_it() -> None:
    selection = select_backend(attrs.evolve(DEEPSEEK, provider="cpu"), profile_for("310P"))
    assert selection.backend is None
    (verdict,) = [entry for entry in selection.verdicts if entry.backend == "mla"]
    assert [entry.rule for entry in verdict.refusals] == ["mla.capability"]
    assert get_attn_backend_cls(use_mla=True) is AscendMLABackend


@pytest.mark.parametrize("family", ["A2", "A3", "A5"])
@pytest.mark.parametrize("lse", [False, True])
def test_calls_are_legal_on_products(family: str, lse: bool) -> None:
    scenario = LatentScenario(
        [4, 1, 9], [20, 5, 9], dtype=torch.bfloat16, causal=[True, False, True]
    )
    impl, caches, metadata = scenario.prepared(scenario.batch())
    queries, output = (scenario.q_nope, scenario.q_pe), torch.empty_like(scenario.q_nope)
    with ascend_attn_ops.use_profile(profile_for(family)):
        if lse:
            output = impl.forward_mqa_partial(*queries, *caches, metadata).out
        else:
            impl.forward_mqa(*queries, *caches, metadata, output)
    torch.testing.assert_close(
        output.double(), scenario.expected()[0], **TOLERANCES[torch.bfloat16]
    )


def test_control_illegal_calls_are_refused_on_products() -> None:
    scenario = LatentScenario([1], [5], heads=3, dtype=torch.bfloat16)
    impl, caches, metadata = scenario.prepared(scenario.batch())
    arguments = (scenario.q_nope, scenario.q_pe, *caches, metadata)
    with (
        ascend_attn_ops.use_profile(profile_for("A2")),
        pytest.raises(ascend_attn_ops.OpArgumentError, match="mla_heads"),
    ):
        impl.forward_mqa_partial(*arguments)
    assert impl.forward_mqa_partial(*arguments).out.isfinite().all()


def test_cache_bytes_as_published() -> None:
    """DeepSeek-V2 (arXiv 2405.04434): latents of 4 heads' width and half a head of rotary width
    take as much as 2.25 groups of grouped-query attention."""
    sizes = cache_bytes_per_token(128, 8, 128, torch.bfloat16)
    assert sizes.equivalent_kv_heads == 2.25
    assert (sizes.mla, sizes.gqa, sizes.mha) == (1152, 4096, 65536)
    assert AscendMLABackend.cache_shape(4, 128).bytes_per_token(torch.bfloat16) == sizes.mla
    wide = cache_bytes_per_token(128, 128, 192, torch.float32, value_size=128)
    assert wide.gqa == wide.mha == 128 * (192 + 128) * 4


@pytest.mark.parametrize("change", [{"num_heads": 0}, {"num_kv_heads": 3}, {"rope_size": 0}])
def test_impossible_cache_sizes_are_named(change: dict[str, int]) -> None:
    arguments: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
    with pytest.raises(InvalidFieldError, match=r"num_heads|rope_size"):
        cache_bytes_per_token(**{**arguments, **change}, dtype=torch.float16)

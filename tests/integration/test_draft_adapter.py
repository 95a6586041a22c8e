"""The adapter of the draft flash backend: vLLM's calls on one layer, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from ascend_attn_backends import AttentionBatchError
from ascend_vllm_plugin import LayerRefusedError
from ascend_vllm_plugin.adapters.draft_flash import (
    DraftFlashBackend,
    DraftFlashImpl,
    DraftFlashMetadataBuilder,
    plan_counters,
)
from ascend_vllm_plugin.patches import dflash2_on_v1

BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 16, 4, 2, 64


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    """What vLLM knows while it builds a draft for which every term of the gate holds."""
    found = VllmConfig()
    target = SimpleNamespace(hf_config=SimpleNamespace(model_type="glm_moe_dsa"))
    draft = SimpleNamespace(enforce_eager=True, architectures=["DFlash2DraftModel"])
    found.speculative_config = SimpleNamespace(  # type: ignore[assignment]
        target_model_config=target, draft_model_config=draft, enforce_eager=None
    )
    found.cache_config.block_size = BLOCK_SIZE
    found.attention_config.use_non_causal = True
    with (
        set_current_vllm_config(found),
        set_model_tag("eagle_head"),
        set_default_torch_dtype(torch.float16),
    ):
        yield found


def layer(**changes: Any) -> DraftFlashImpl:
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 0.125, "num_kv_heads": KV_HEADS}
    return DraftFlashImpl(**{**arguments, **changes})


def builder(config: VllmConfig) -> DraftFlashMetadataBuilder:
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    return DraftFlashMetadataBuilder(spec, ["draft.0"], config, torch.device("cpu"))


def common(device: str = "cpu", causal: Any = False) -> CommonAttentionMetadata:
    """Blocks of 3 queries after 5 and 18 tokens of context, in blocks of 16."""
    starts, lens = torch.tensor([0, 3, 6]).int(), torch.tensor([8, 21]).int()
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device),
        seq_lens_cpu_upper_bound=lens + 2,
        num_reqs=2,
        num_actual_tokens=6,
        max_query_len=3,
        max_seq_len=23,
        block_table_tensor=torch.tensor([[4, 0], [1, 2]]).int().to(device),
        slot_mapping=torch.tensor([69, 70, 71, 34, 35, 36]).to(device),
        causal=causal,
    )


CONTEXT_SLOTS = torch.tensor([*range(64, 69), -1, *range(16, 32), *range(32, 34)])
"""Slots of the contexts; the row between them belongs to a rejected draft."""


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Every query of a request sees all of its keys; in float64."""
    group = HEADS // KV_HEADS
    wide, deep = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), wide) * 0.125
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), deep)


def test_context_and_block_are_attended_to_without_a_mask(config: VllmConfig) -> None:
    """vLLM stores the context alone, then the block, then asks for its attention."""
    torch.manual_seed(0)
    cache = torch.zeros(8, KV_HEADS, BLOCK_SIZE, 2 * SIZE, dtype=torch.float16)
    context = torch.randn(2, 24, KV_HEADS, SIZE).half()
    block = torch.randn(2, 6, KV_HEADS, SIZE).half()
    query, output = torch.randn(6, HEADS, SIZE).half(), torch.empty(6, HEADS, SIZE).half()
    impl, metadata = layer(), builder(config).build(0, common())
    impl.do_kv_cache_update(None, context[0], context[1], cache, CONTEXT_SLOTS)
    impl.do_kv_cache_update(None, block[0], block[1], cache, metadata.slot_mapping)
    result = impl.forward(None, query, None, None, cache, metadata, output)
    assert result is output
    for rows, own in ((slice(0, 3), slice(0, 5)), (slice(3, 6), slice(6, 24))):
        keys, values = (torch.cat([context[i, own], block[i, rows]]) for i in (0, 1))
        torch.testing.assert_close(
            output[rows].double(), expected(query[rows], keys, values), rtol=2e-3, atol=2e-3
        )
        without_block = expected(query[rows], context[0, own], context[1, own])
        assert (output[rows].double() - without_block).abs().max() > 0.1


def test_layers_share_the_plan_of_a_step(config: VllmConfig) -> None:
    cache = torch.randn(8, KV_HEADS, BLOCK_SIZE, 2 * SIZE).half()
    query = torch.randn(6, HEADS, SIZE).half()
    layers, build = [layer(), layer(), layer(num_kv_heads=1)], builder(config)
    before = plan_counters()
    for _ in range(2):
        metadata = build.build(0, common())
        for impl in layers:
            heads = impl.num_kv_heads
            impl.forward(
                None, query, None, None, cache[:, :heads], metadata, torch.empty_like(query)
            )
    after = plan_counters()
    assert after["builds"] - before["builds"] == 2 * 2  # two steps, two geometries
    assert after["hits"] - before["hits"] == 2 * 1


def test_metadata_reads_nothing_from_a_device(config: VllmConfig) -> None:
    """Tensors on `meta` have no values: reading one raises."""
    metadata = builder(config).build(0, common("meta"))
    assert metadata.lengths.seq_lens.device.type == "meta"
    assert metadata.causal is False  # what vLLM's DFlash drafter asks
    assert (metadata.num_tokens, metadata.max_seq_len) == (6, 23)


def test_causality_is_one_for_the_step(config: VllmConfig) -> None:
    with pytest.raises(AttentionBatchError, match="one value per request"):
        builder(config).build(0, common(causal=torch.tensor([True, False])))


def test_layer_without_metadata_is_a_measurement_of_memory(config: VllmConfig) -> None:
    output = torch.ones(3, HEADS, SIZE)
    layer().forward(None, torch.ones(3, HEADS, SIZE), None, None, torch.empty(0), None, output)
    assert not output.any()


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "draft_flash.alibi"),
        ({"logits_soft_cap": 30.0}, "draft_flash.logits_soft_cap"),
        ({"sinks": torch.zeros(HEADS)}, "draft_flash.sinks"),
        ({"kv_cache_dtype": "fp8"}, "draft_flash.dtype"),
        ({"attn_type": "encoder_only"}, "draft_flash.attn_type"),
        ({"kv_sharing_target_layer_name": "x"}, "draft_flash.kv_sharing_target_layer_name"),
        ({"chunk_lookback": 3}, "draft_flash.chunk_lookback"),
    ],
)
def test_layer_refuses_what_it_does_not_compute(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(LayerRefusedError) as raised:
        layer(**changes)
    assert [refusal.rule for refusal in raised.value.refusals] == [rule]


def test_layer_of_a_target_is_refused(config: VllmConfig) -> None:
    with set_model_tag("backbone"), pytest.raises(LayerRefusedError, match=r"draft_flash\.role"):
        layer()


def test_vllm_is_told_what_the_backend_takes() -> None:
    assert DraftFlashBackend.get_name() == "CUSTOM"
    assert DraftFlashBackend.supports_non_causal()
    assert DraftFlashBackend.get_impl_cls() is DraftFlashImpl
    assert DraftFlashBackend.get_builder_cls() is DraftFlashMetadataBuilder
    assert not DraftFlashBackend.forward_includes_kv_cache_update


def test_vllm_draws_candidates_with_the_temperature_of_each_request() -> None:
    """The drawing that a DFlash2 draft does is vLLM's own; a temperature of 0 is greedy."""
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([1.0, 0.5, 0.0])
    metadata = SimpleNamespace(all_greedy=False, all_random=False, temperature=temperature)
    index, probabilities = dflash2_on_v1._drawn(metadata, use_fp64=False)(scores.clone())
    assert probabilities is not None
    torch.testing.assert_close(probabilities[:2], (scores[:2] / temperature[:2, None]).softmax(-1))
    assert index[2] == scores[2].argmax()

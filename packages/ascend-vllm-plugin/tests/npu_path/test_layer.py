"""One dense attention layer of vLLM on an emulated NPU, and why it has caches of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 64, 16, 6
LENGTHS, FRESH = (21, 9), (21, 1)
"""Keys of two requests, and how many of them this step brings: a prompt, and a decode."""


@pytest.fixture(scope="module", autouse=True)
def config(npu: Any) -> Iterator[Any]:
    from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config

    made = VllmConfig(cache_config=CacheConfig(block_size=BLOCK))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with set_current_vllm_config(made):
            yield made
    finally:
        torch.set_default_dtype(before)


def layer(implementation: str, **changes: Any) -> Any:
    from ascend_vllm_plugin.adapters.standard import StandardImpl
    from ascend_vllm_plugin.npu import backends

    found = {"StandardImpl": StandardImpl, **vars(backends)}[implementation]
    return found(**{"num_heads": HEADS, "head_size": SIZE, "scale": SIZE**-0.5,
                    "num_kv_heads": KV_HEADS, **changes})  # fmt: skip


def numbers(seed: int, heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), heads, SIZE, generator=generator).half()


def slots() -> torch.Tensor:
    """Request 0 has blocks 4 and 1, request 1 has block 3; each of the tokens in turn."""
    first = [(4, 1)[place // BLOCK] * BLOCK + place % BLOCK for place in range(LENGTHS[0])]
    return torch.tensor([*first, *(3 * BLOCK + place for place in range(LENGTHS[1]))])


def fresh_rows() -> torch.Tensor:
    """The rows of `numbers` that belong to this step."""
    ends = (LENGTHS[0], sum(LENGTHS))
    return torch.cat(
        [torch.arange(end - count, end) for end, count in zip(ends, FRESH, strict=True)]
    )


def metadata(config: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from ascend_vllm_plugin.adapters.standard import StandardMetadataBuilder

    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float16
    )
    device = torch.device("npu")
    starts = torch.tensor([0, FRESH[0], sum(FRESH)], dtype=torch.int32)
    keys = torch.tensor(LENGTHS, dtype=torch.int32)
    common = SimpleNamespace(
        num_reqs=2,
        num_actual_tokens=sum(FRESH),
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=keys.to(device),
        seq_lens_cpu_upper_bound=keys,
        block_table_tensor=torch.tensor([[4, 1], [3, 0]], dtype=torch.int32, device=device),
        slot_mapping=slots()[fresh_rows()].to(device),
        max_query_len=max(FRESH),
        max_seq_len=max(LENGTHS),
        causal=True,
        is_prefilling=torch.tensor([True, False]),
    )
    return StandardMetadataBuilder(spec, ["layer"], config, device).build(0, common)


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's own attention in float64, request by request."""
    parts, end = [], 0
    for keys, count in zip(LENGTHS, FRESH, strict=True):
        end += keys
        rows = slice(end - keys, end)
        q, k, v = (
            t[s].double().transpose(0, 1)
            for t, s in ((query, slice(end - count, end)), (key, rows), (value, rows))
        )
        mask = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def run(impl: Any, cache: Any, config: Any) -> torch.Tensor:
    """Fill the cache with all keys and values, then attend with the step's queries."""
    query, key, value = numbers(1, HEADS), numbers(2, KV_HEADS), numbers(3, KV_HEADS)
    impl.do_kv_cache_update(None, key.npu(), value.npu(), cache, slots().npu())
    fresh = query[fresh_rows()].npu()
    out = torch.full_like(fresh, torch.nan)
    result = impl.forward(None, fresh, None, None, cache, metadata(config), out)
    assert result.data_ptr() == out.data_ptr()
    return out.cpu()


def joined() -> torch.Tensor:
    """vLLM's cache of a layer."""
    return torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.float16, device="npu")


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """vllm-ascend's caches of a layer, in the shape that our backend tells its runner."""
    from ascend_vllm_plugin.npu.backends import OverlayStandardBackend

    shape = OverlayStandardBackend.get_kv_cache_shape(BLOCKS, BLOCK, KV_HEADS, SIZE)
    both = torch.zeros(shape, dtype=torch.float16, device="npu")
    return both[0], both[1]


@pytest.mark.parametrize(
    ("implementation", "cache"),
    [("NpuStandardImpl", joined), ("OverlayStandardImpl", pair)],
    ids=["standalone", "overlay"],
)
def test_one_layer_equals_attention_in_float64(
    implementation: str, cache: Any, config: Any, npu: Any
) -> None:
    with npu.record() as seen:
        found = run(layer(implementation), cache(), config)
    wanted = expected(numbers(1, HEADS), numbers(2, KV_HEADS), numbers(3, KV_HEADS))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)
    assert [name for name in seen.operators if "FusedInfer" in name or "Scatter" in name]
    # Control: without the last key the decode is another.
    shorter = expected(numbers(1, HEADS), numbers(2, KV_HEADS).roll(1, 0), numbers(3, KV_HEADS))
    assert (found.double() - shorter).abs().max() > 0.1


def test_keys_come_before_values_in_the_memory_of_a_layer() -> None:
    cache = joined()
    keys, values = layer("NpuStandardImpl").split_cache(cache)
    for half in (keys, values):
        assert half.shape == (BLOCKS, KV_HEADS, BLOCK, SIZE)
        assert half.transpose(1, 2).is_contiguous()
    assert keys.data_ptr() == cache.data_ptr()
    assert values.data_ptr() == cache.data_ptr() + cache.nbytes // 2


def test_latents_come_before_rotary_rows_in_the_memory_of_a_layer() -> None:
    from ascend_vllm_plugin.npu.backends import NpuMLAImpl

    cache = torch.zeros(BLOCKS, BLOCK, 576, dtype=torch.float16, device="npu")
    own = SimpleNamespace(latent_size=512, rope_size=64)
    latent, rope = NpuMLAImpl.views_of(own, cache)
    assert (latent.shape, rope.shape) == ((BLOCKS, 1, BLOCK, 512), (BLOCKS, 1, BLOCK, 64))
    assert latent.is_contiguous()
    assert rope.is_contiguous()
    assert rope.data_ptr() - cache.data_ptr() == latent.nbytes


def test_values_behind_their_keys_are_refused_by_the_operator(config: Any) -> None:
    """Why the adapter of simulate mode does not do on an NPU."""
    from ascend_attn_ops import OpArgumentError

    with pytest.raises(OpArgumentError, match=r"scatter_pa_kv_cache\.contiguous"):
        run(layer("StandardImpl"), joined(), config)


def test_a_layer_in_float32_is_refused() -> None:
    from ascend_vllm_plugin import LayerRefusedError

    torch.set_default_dtype(torch.float32)
    try:
        with pytest.raises(LayerRefusedError, match="float32"):
            layer("NpuStandardImpl")
    finally:
        torch.set_default_dtype(torch.float16)


def test_what_vllm_is_told_of_the_backends() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from ascend_vllm_plugin.adapters.draft_flash import DraftFlashMetadataBuilder
    from ascend_vllm_plugin.npu import backends

    assert backends.NpuStandardBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
    assert backends.NpuStandardBackend.get_preferred_block_size(16) == 128
    assert backends.NpuStandardBackend.supported_dtypes == [torch.float16, torch.bfloat16]
    draft = backends.OverlayDraftFlashBackend
    assert draft.get_builder_cls() is DraftFlashMetadataBuilder
    assert draft.get_impl_cls() is backends.OverlayDraftFlashImpl
    assert draft.get_kv_cache_shape(5, 128, 2, 64) == (2, 5, 128, 2, 64)

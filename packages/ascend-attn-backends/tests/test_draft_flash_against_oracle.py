"""The draft backend against the dense float64 formula and Hugging Face's Qwen3 module."""

from __future__ import annotations

import pytest
import torch
from attn_backends_support import Scenario, padded, steps
from draft_flash_support import device_only, layer_of, run_draft, run_layer
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendFlashAttentionBackend,
    AscendFlashAttentionImpl,
    AscendFlashAttentionMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    draft_step,
)
from ascend_attn_ops import use_profile


@given(
    steps(),
    st.sampled_from([16, 128]),
    st.none() | st.integers(1, 50),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.tuples(st.integers(0, 3), st.integers(0, 5)),
)
def test_any_step(
    step: tuple[list[int], list[int]],
    block_size: int,
    window: int | None,
    causal: bool,
    dtype: torch.dtype,
    token_major: bool,
    padding: tuple[int, int],
) -> None:
    scenario = Scenario(
        *step,
        block_size=block_size,
        head_size=64,
        window=window,
        causal=causal,
        dtype=dtype,
        token_major=token_major,
    )
    batch = scenario.batch()
    batch = batch.padded(batch.num_rows + padding[0], batch.num_token_rows + padding[1])
    output = run_draft(scenario, batch)
    scenario.compare(output)
    assert torch.count_nonzero(output[batch.num_tokens :]) == 0


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("k", range(1, 9))
def test_block_drafts_of_k_tokens(k: int, block_size: int) -> None:
    """DFlash: the bonus token and k masks per request see each other and the context."""
    scenario = Scenario(
        [k + 1] * 4, [k + 1, 40, 130, 17 + k], block_size=block_size, head_size=64, causal=False
    )
    scenario.compare(run_draft(scenario))
    with pytest.raises(AssertionError):  # control: a causal mask is something else
        scenario.compare(run_draft(scenario, scenario.batch(causal=True)))


def test_control_a_key_too_many_differs() -> None:
    scenario = Scenario([1, 1], [20, 9], head_size=64)
    scenario.compare(run_draft(scenario))
    longer = scenario.batch()
    longer.seq_lens.add_(1)
    with pytest.raises(AssertionError):
        scenario.compare(run_draft(scenario, longer))


@pytest.mark.parametrize("count", [0, 3])
def test_a_step_without_tokens_writes_only_padding(count: int) -> None:
    scenario = Scenario([0, 0, 0], [5, 5, 5], head_size=64)
    batch = AttentionBatch.from_lengths([0] * count, [5] * count, 16).padded(count, 2)
    output = run_draft(scenario, batch)
    assert output.shape == (2, 4, 64)
    assert torch.count_nonzero(output) == 0


def test_mixed_causality_is_refused() -> None:
    scenario = Scenario([1, 2], [5, 6], head_size=64, causal=[True, False])
    with pytest.raises(AttentionBatchError, match="causal: found one value per request"):
        run_draft(scenario)


@given(steps(max_query=6), st.data())
def test_rejected_tokens_count_for_nothing(
    step: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    """With the last tokens rejected the rest is what a batch without them gives."""
    query_lens, seq_lens = step
    rejected = [data.draw(st.integers(0, length - 1)) for length in query_lens]
    whole = Scenario(query_lens, seq_lens, head_size=64)
    output = run_draft(whole, num_rejected=torch.tensor(rejected, dtype=torch.int32))
    kept = Scenario(query_lens, seq_lens, head_size=64)
    rows = torch.cat(
        [
            torch.arange(length) < length - gone
            for length, gone in zip(query_lens, rejected, strict=True)
        ]
    )
    kept.query = kept.query[rows]
    kept.query_lens = [n - gone for n, gone in zip(query_lens, rejected, strict=True)]
    kept.seq_lens = [n - gone for n, gone in zip(seq_lens, rejected, strict=True)]
    kept.keys = [keys[:n] for keys, n in zip(kept.keys, kept.seq_lens, strict=True)]
    kept.values = [values[:n] for values, n in zip(kept.values, kept.seq_lens, strict=True)]
    kept.compare(output[rows])
    run_draft(kept)
    assert torch.equal(whole.key_cache, kept.key_cache)
    assert torch.equal(whole.value_cache, kept.value_cache)
    assert torch.count_nonzero(output[~rows]) == 0


@pytest.mark.parametrize("profile", ["A5", "Ascend950DT_9572"])
def test_the_operator_takes_the_call_on_the_products_that_have_it(profile: str) -> None:
    scenario = Scenario([4, 1, 9], [20, 5, 9], head_size=64, dtype=torch.bfloat16, window=7)
    expected = run_draft(scenario)
    with use_profile(profile):
        assert torch.equal(run_draft(scenario), expected)
    scenario.compare(expected)


pytest.importorskip("transformers", reason="the test extra installs transformers")

from transformers import Qwen3Config  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3 as qwen3  # noqa: E402

HEADS, KV_HEADS, SIZE, BLOCK, HIDDEN = 4, 2, 64, 16, 96


def qwen3_module(window: int | None, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    config = Qwen3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        num_hidden_layers=1,
        vocab_size=32,
        attn_implementation="eager",
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
    )
    module = qwen3.Qwen3Attention(config, layer_idx=0).to(dtype)
    return module, qwen3.Qwen3RotaryEmbedding(config)


def eager(module: torch.nn.Module, rotary: torch.nn.Module, hidden: torch.Tensor,
          window: int | None) -> torch.Tensor:  # fmt: skip
    """The module itself on a whole text."""
    positions = torch.arange(len(hidden))
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (window or len(hidden)))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min).to(hidden.dtype)
    out = module(
        hidden[None],
        position_embeddings=rotary(hidden[None], positions[None]),
        attention_mask=mask[None, None],
    )
    return out[0][0]


class DraftLayer:
    """The module with the draft backend between its projections and its output projection."""

    def __init__(self, module: torch.nn.Module, rotary: torch.nn.Module, window: int | None,
                 dtype: torch.dtype) -> None:  # fmt: skip
        self.module, self.rotary = module, rotary
        shape = AscendFlashAttentionBackend.cache_shape(24, BLOCK, KV_HEADS, SIZE)
        self.caches = [shape.allocate(dtype) for _ in range(2)]
        self.impl = AscendFlashAttentionImpl(HEADS, SIZE, module.scaling, KV_HEADS, window)
        self.builder = AscendFlashAttentionMetadataBuilder(BLOCK)

    def step(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        num_rejected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        m, metadata = self.module, self.builder.build(device_only(batch), num_rejected)
        query, key, value = (
            project(hidden).unflatten(-1, (-1, SIZE)) for project in (m.q_proj, m.k_proj, m.v_proj)
        )
        turned = [m.q_norm(query), m.k_norm(key)]
        rotary = self.rotary(hidden[None], positions[None])
        turned = list(qwen3.apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in turned),
                                                 *rotary))  # fmt: skip
        query, key = (x[0].transpose(0, 1) for x in turned)
        self.impl.write_kv(key, value, *self.caches, metadata.slot_mapping)
        output = self.impl.forward(query, *self.caches, metadata, torch.empty_like(query))
        return m.o_proj(output.flatten(1))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_steps_equal_the_eager_module(window: int | None, dtype: torch.dtype) -> None:
    """Prompts, then verification of 3 drafts with 3, 0 and 1 rejected, then three draft steps."""
    torch.manual_seed(0)
    module, rotary = qwen3_module(window, dtype)
    layer = DraftLayer(module, rotary, window, dtype)
    prompts, rejected, k = [29, 5, 44], [3, 0, 1], 3
    table = torch.randperm(24)[:12].reshape(3, 4).int()
    kept = [n + 4 - gone for n, gone in zip(prompts, rejected, strict=True)]
    texts = [torch.randn(n + k, HIDDEN).to(dtype) for n in kept]
    drafts = [torch.randn(gone, HIDDEN).to(dtype) for gone in rejected]

    outputs: list[list[torch.Tensor]] = [[], [], []]
    batch = AttentionBatch.from_lengths(prompts, prompts, BLOCK, block_table=table)
    hidden = torch.cat([text[:n] for text, n in zip(texts, prompts, strict=True)])
    out = layer.step(hidden, torch.cat([torch.arange(n) for n in prompts]), batch)
    for rows, part in zip(outputs, out.split(prompts), strict=True):
        rows.append(part)

    ends = [n + 4 for n in prompts]
    batch = AttentionBatch.from_lengths([4] * 3, ends, BLOCK, block_table=table)
    hidden = torch.cat(
        [
            torch.cat([text[n:known], draft])
            for text, draft, n, known in zip(texts, drafts, prompts, kept, strict=True)
        ]
    )
    gone = torch.tensor(rejected, dtype=torch.int32)
    positions = torch.cat([torch.arange(n, n + 4) for n in prompts])
    out = layer.step(hidden, positions, batch, gone)
    for rows, part, count in zip(outputs, out.split(4), rejected, strict=True):
        rows.append(part[: 4 - count])

    for offset in range(k):
        step = draft_step(
            batch, gone, offset=offset, query_len=1, block_size=BLOCK, max_model_len=64
        )
        hidden = torch.stack([text[n + offset] for text, n in zip(texts, kept, strict=True)])
        out = layer.step(hidden, step.positions, step.batch, step.num_unused)
        for rows, part in zip(outputs, out, strict=True):
            rows.append(part[None])

    stale = draft_step(
        batch, torch.zeros_like(gone), offset=0, query_len=1, block_size=BLOCK, max_model_len=64
    )
    hidden = torch.stack([text[n] for text, n in zip(texts, kept, strict=True)])
    wrong = layer.step(hidden, stale.positions, stale.batch, stale.num_unused)

    # In bfloat16 the eager module also rounds scores and probabilities.
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.02}
    )
    expected = [eager(module, rotary, text, window) for text in texts]
    for rows, whole in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), whole, **tolerance)
    first = torch.stack([whole[n] for whole, n in zip(expected, kept, strict=True)])
    torch.testing.assert_close(wrong[1], first[1], **tolerance)  # nothing was rejected here
    with pytest.raises(AssertionError):  # control: counting on from the rejected drafts shows
        torch.testing.assert_close(wrong[0], first[0], **tolerance)


def test_the_callers_output_is_written_in_place() -> None:
    scenario = Scenario([3, 1], [20, 9], head_size=64)
    metadata = AscendFlashAttentionMetadataBuilder(16).build(scenario.batch())
    run_layer(scenario, metadata, 4)
    whole = torch.full((9, 4 * 64), torch.nan)
    view = whole[2:6].unflatten(1, (4, 64))
    caches = (scenario.key_cache, scenario.value_cache)
    layer_of(scenario).forward(padded(scenario.query, 4), *caches, metadata, view)
    scenario.compare(view)
    assert whole[:2].isnan().all()
    assert whole[6:].isnan().all()

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fused_infer_attention_score import _case, paged

import ascend_attn_ops as ops


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ops.PartialAttention:
    heads, size = query.shape[1:]
    if key.shape[0] == 0:
        return ops.PartialAttention.empty(query.shape[0], heads, size, query.dtype)
    out, lse = ops.fused_infer_attention_score(
        query, key, value, actual_seq_lengths=[query.shape[0]],
        actual_seq_lengths_kv=[key.shape[0]], num_heads=heads, scale=0.3, input_layout="TND",
        softmax_lse_flag=True,
    )  # fmt: skip
    return ops.PartialAttention.from_infinite_lse(out, lse)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 1000))
def test_any_split_of_the_keys_merges_to_the_whole(sizes: list[int], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    query = torch.randn(3, 4, 16, generator=rng)
    key, value = torch.randn(2, total, 4, 16, generator=rng)
    parts = [
        _attend(query, k, v) for k, v in zip(key.split(sizes), value.split(sizes), strict=True)
    ]
    merged = ops.merge_partials(parts)
    whole = _attend(query, key, value)
    torch.testing.assert_close(merged.out, whole.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-5, atol=1e-5)


def test_no_keys_anywhere_is_zero_and_minus_infinity() -> None:
    parts = [ops.PartialAttention.empty(2, 3, 4, torch.float32) for _ in range(3)]
    merged = ops.merge_partials(parts)
    assert not merged.out.any()
    assert bool(merged.lse.isneginf().all())


def test_rows_without_keys_are_neutral_whatever_their_values() -> None:
    arguments, _ = paged(_case(q_lens=[4], kv_lens=[2]))
    out, lse = ops.fused_infer_attention_score(**arguments)
    part = ops.PartialAttention.from_infinite_lse(torch.full_like(out, float("nan")), lse)
    assert bool(part.lse[:2].isneginf().all())
    assert not part.out[:2].any()
    other = ops.PartialAttention(torch.ones_like(out), torch.zeros(4, 4))
    assert torch.equal(ops.merge_partials([part, other]).out[:2], other.out[:2])


def test_max_and_sum_convention() -> None:
    maximum, total = torch.tensor([[[2.0], [-2e38]]]), torch.tensor([[[3.0], [0.0]]])
    part = ops.PartialAttention.from_max_and_sum(torch.ones(2, 1, 4), maximum, total)
    torch.testing.assert_close(part.lse[0, 0], 2 + torch.tensor(3.0).log())
    assert bool(part.lse[1].isneginf().all())
    assert not part.out[1].any()


def test_statistics_of_several_key_heads_go_to_their_query_heads() -> None:
    """(KN, T, N/KN) or (B, KN, S, N/KN) in, (T, N) out: head n belongs to key head n // (N/KN)."""
    key_heads, group, batch, length = 2, 3, 2, 4
    heads = key_heads * group
    lse = torch.arange(batch * length * heads).float().view(batch, length, heads)
    out = torch.randn(batch, length, heads, 5)
    maximum = torch.stack(
        [lse[..., :group], lse[..., group:]], 1
    )  # (B, KN, S, N/KN), written head by head
    part = ops.PartialAttention.from_max_and_sum(out, maximum, torch.ones_like(maximum))
    assert torch.equal(part.lse, lse.view(-1, heads))
    assert torch.equal(part.out, out.view(-1, heads, 5))
    one = ops.PartialAttention.from_max_and_sum(out[1], maximum[1], torch.ones_like(maximum[1]))
    assert torch.equal(one.lse, lse[1])


def test_merging_nothing_and_unequal_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ops.merge_partials([])
    with pytest.raises(ValueError, match="one shape"):
        ops.merge_partials([ops.PartialAttention.empty(n, 1, 4, torch.float32) for n in (1, 2)])

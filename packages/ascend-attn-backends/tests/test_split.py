from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import AttentionBatch, AttentionBatchError, RequestGroup, prefill_flags


def batch_of(query_lens: list[int], prefilling: list[bool] | None) -> AttentionBatch:
    seq_lens = [length + 100 for length in query_lens]
    return AttentionBatch.from_lengths(query_lens, seq_lens, 16, is_prefilling=prefilling)


def test_three_kinds() -> None:
    split = batch_of([1, 4, 50, 0, 1, 2], [False, False, True, False, True, False]).split(3)
    assert split.decode.rows == (0,)
    assert split.spec_decode.rows == (1, 5)
    assert split.prefill.rows == (2, 4)
    assert split.spec_decode.query_lens == (4, 2)
    assert split.spec_decode.token_starts == (1, 56)
    assert (split.spec_decode.num_tokens, split.spec_decode.max_query_len) == (6, 4)


def test_padding_rows_are_in_no_group() -> None:
    split = batch_of([1, 3], [False, True]).padded(5, 9).split(0)
    assert split.decode.rows + split.spec_decode.rows + split.prefill.rows == (0, 1)


def test_more_tokens_than_drafts_allow_is_a_recomputation() -> None:
    assert batch_of([5], [False]).split(3).prefill.rows == (0,)


def test_lengths_alone_do_not_tell() -> None:
    with pytest.raises(AttentionBatchError, match="is_prefilling: found None, while row 1 has 4"):
        batch_of([1, 4], None).split(3)


def test_single_tokens_need_no_flags() -> None:
    assert batch_of([1, 1], None).split(3).decode.rows == (0, 1)


def test_negative_draft_count_is_refused() -> None:
    with pytest.raises(AttentionBatchError, match="num_spec_tokens: found -1"):
        batch_of([1], None).split(-1)


def test_prefill_flags() -> None:
    computed, prompt = torch.tensor([0, 9, 10, 12]), torch.tensor([10, 10, 10, 10])
    assert prefill_flags(computed, prompt).tolist() == [True, True, False, False]
    recomputing = torch.tensor([False, False, False, True])
    assert prefill_flags(computed, prompt, recomputing).tolist() == [True, True, False, True]


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=8), st.integers(0, 4))
def test_every_request_with_tokens_is_in_one_group(rows: list[tuple[int, bool]], k: int) -> None:
    batch = batch_of([n for n, _ in rows], [flag for _, flag in rows])
    split = batch.split(k)
    groups = attrs.asdict(split, recurse=False).values()
    members = sorted(row for group in groups for row in group.rows)
    assert members == [row for row, (length, _) in enumerate(rows) if length]
    assert sum(group.num_tokens for group in groups) == batch.num_tokens
    for row in (*split.decode.rows, *split.spec_decode.rows):
        assert not rows[row][1]
        assert rows[row][0] <= k + 1


@given(st.lists(st.integers(0, 4), max_size=6), st.data())
def test_token_rows_of_a_group(lengths: list[int], data: st.DataObject) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    chosen = [row for row in range(len(lengths)) if data.draw(st.booleans())]
    group = RequestGroup.from_starts(starts, chosen)
    expected = [token for row in chosen for token in range(starts[row], starts[row + 1])]
    assert group.token_indices().tolist() == expected
    if group.token_slice is None:
        assert expected != list(range(expected[0], expected[0] + len(expected)))
    else:
        assert list(range(sum(lengths)))[group.token_slice] == expected

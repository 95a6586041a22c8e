"""The n-gram proposer, driven as vLLM drives it."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_vllm_plugin import NgramProposer, OptionError


def config(k=4, max_model_len=64, additional_config=None):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        additional_config=additional_config or {},
    )


def buffers(rows, width=64):
    """vLLM's buffers: whatever was there before follows the tokens of a request."""
    tokens = np.full((len(rows) + 2, width), 7, dtype=np.int32)
    lengths = np.zeros(len(rows) + 2, dtype=np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
        lengths[index] = len(row)
    return lengths, tokens


def test_drafts_what_followed_the_last_occurrence():
    rows = [[1, 2, 3, 4, 5, 6, 1, 2], [9, 8, 5, 5, 9, 8]]
    proposer = NgramProposer(config())
    assert proposer.propose([[2], [9, 8]], *buffers(rows)) == [[3, 4, 5, 6], [5, 5, 9, 8]]


def test_drafts_nothing_for_a_prompt_that_is_not_complete():
    rows = [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]]
    assert NgramProposer(config()).propose([[], [2]], *buffers(rows)) == [[], [3, 1, 2]]


def test_drafts_nothing_without_an_earlier_occurrence():
    assert NgramProposer(config()).propose([[3]], *buffers([[1, 2, 3]])) == [[]]


@pytest.mark.parametrize(("length", "drafts"), [(60, 4), (62, 2), (63, 1), (64, 0)])
def test_drafts_never_reach_beyond_the_model(length, drafts):
    row = [1, 2, 3, 4, 5] * 13
    proposer = NgramProposer(config(max_model_len=64))
    (drafted,) = proposer.propose([[row[length - 1]]], *buffers([row[:length]]))
    assert drafted == row[length : length + drafts]


def test_options_set_the_lengths_of_the_run():
    row = [1, 2, 9, 4, 2]
    short = {"ascend": {"ngram_min": 1, "ngram_max": 1}}
    assert NgramProposer(config()).propose([[2]], *buffers([row])) == [[]]
    assert NgramProposer(config(additional_config=short)).propose([[2]], *buffers([row])) == [
        [9, 4, 2]
    ]


def test_wrong_options_are_refused():
    with pytest.raises(OptionError, match=r"ascend\.ngram"):
        NgramProposer(config(additional_config={"ascend": {"ngram": 3}}))


def test_needs_a_number_of_draft_tokens():
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        NgramProposer(config(k=None))


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4),
    k=st.integers(1, 6),
)
def test_every_draft_occurs_in_its_own_request(rows, k):
    drafts = NgramProposer(config(k=k)).propose([[row[-1]] for row in rows], *buffers(rows))
    assert len(drafts) == len(rows)
    for row, drafted in zip(rows, drafts, strict=True):
        assert len(drafted) <= k
        starts = range(len(row) - len(drafted) + 1)
        assert any(row[start : start + len(drafted)] == drafted for start in starts)
        assert all(type(token) is int for token in drafted)

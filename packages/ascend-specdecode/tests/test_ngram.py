from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ascend_specdecode import ArgumentError, NgramDrafter, find_ngram, propose_ngram

# Few distinct tokens, so that n-grams repeat, overlap and nest often.
contexts = st.integers(1, 4).flatmap(
    lambda vocabulary: st.lists(st.integers(0, vocabulary - 1), max_size=40)
)
lengths = st.tuples(st.integers(1, 6), st.integers(0, 5)).map(lambda pair: (pair[0], sum(pair)))


def earlier_ends(tokens: list[int], n: int) -> list[int]:
    """Every index after an earlier occurrence of the last n tokens, by comparing slices."""
    suffix = tokens[len(tokens) - n :]
    starts = range(len(tokens) - n)
    return [start + n for start in starts if tokens[start : start + n] == suffix]


def brute_force(
    tokens: list[int], min_n: int, max_n: int, k: int, pick: Callable[[list[int]], int] = max
) -> list[int]:
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        ends = earlier_ends(tokens, n)
        if ends:
            return tokens[pick(ends) :][:k]
    return []


@given(contexts, lengths, st.integers(0, 7))
def test_equals_brute_force(tokens: list[int], between: tuple[int, int], k: int) -> None:
    assert propose_ngram(tokens, *between, k) == brute_force(tokens, *between, k)


@given(contexts, lengths)
def test_match_is_an_earlier_occurrence_of_the_suffix(
    tokens: list[int], between: tuple[int, int]
) -> None:
    match = find_ngram(tokens, *between)
    if match is None:
        assert not earlier_ends(tokens, between[0])
        return
    assert between[0] <= match.length <= between[1]
    assert 0 < match.end < len(tokens)
    assert tokens[match.end - match.length : match.end] == tokens[len(tokens) - match.length :]


def test_first_occurrence_instead_of_the_last_is_told_apart() -> None:
    """The comparison with brute force sees a drafter that takes the wrong occurrence."""
    tokens = [1, 2, 7, 1, 2, 8, 1, 2]
    assert brute_force(tokens, 1, 2, 1, pick=min) == [7]
    assert propose_ngram(tokens, 1, 2, 1) == [8]


@pytest.mark.parametrize(
    ("tokens", "min_n", "max_n", "k", "expected"),
    [
        pytest.param([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, 3, 2, [9, 2], id="longest-beats-recent"),
        pytest.param([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, 2, 2, [8, 1], id="max_n-caps-the-match"),
        pytest.param([5, 1, 6, 1], 2, 3, 4, [], id="min_n-not-reached"),
        pytest.param([4, 4, 4, 4], 1, 2, 3, [4], id="overlapping-occurrence"),
        pytest.param([1, 2, 1], 1, 1, 5, [2, 1], id="fewer-than-k-follow"),
        pytest.param([1, 2, 1], 1, 1, 0, [], id="k-zero"),
        pytest.param([3], 1, 1, 1, [], id="single-token"),
        pytest.param([], 1, 1, 1, [], id="empty"),
        pytest.param([1, 2, 3], 1, 3, 2, [], id="nothing-repeats"),
    ],
)
def test_small_cases(
    tokens: list[int], min_n: int, max_n: int, k: int, expected: list[int]
) -> None:
    assert propose_ngram(tokens, min_n, max_n, k) == expected


@given(contexts, lengths, st.integers(0, 7))
def test_container_does_not_matter(tokens: list[int], between: tuple[int, int], k: int) -> None:
    drafter = NgramDrafter(*between, k)
    expected = drafter.propose(tokens)
    assert drafter.propose(np.array(tokens, dtype=np.int32)) == expected
    assert drafter.propose(np.array(tokens, dtype=np.uint16)) == expected
    assert drafter.propose(torch.tensor(tokens, dtype=torch.int64)) == expected
    assert all(type(token) is int for token in expected)


def test_context_is_not_changed_and_arrays_are_not_copied() -> None:
    buffer = np.array([[1, 2, 3, 1, 2, 99]], dtype=np.int32)
    row = buffer[0, :5]
    row.flags.writeable = False
    assert NgramDrafter(1, 3, 2).propose(row) == [3, 1]
    assert buffer.tolist() == [[1, 2, 3, 1, 2, 99]]


def test_long_context() -> None:
    tokens = np.random.default_rng(0).integers(10, 50_000, 131_072)
    tokens[1000:1004] = [1, 2, 3, 4]
    tokens[-4:] = [1, 2, 3, 4]
    assert propose_ngram(tokens, 4, 8, 3) == tokens[1004:1007].tolist()


vllm_contexts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@pytest.fixture(scope="session")
def vllm_propose() -> Callable[[list[int], int, int, int], list[int]]:
    """vLLM's own compiled n-gram search, where vLLM and numba are installed."""
    pytest.importorskip("numba", reason="vLLM's n-gram search is compiled by numba")
    pytest.importorskip("vllm", reason="compares with vLLM's own n-gram search")
    module: Any = pytest.importorskip("vllm.v1.spec_decode.ngram_proposer")
    search = module._find_longest_matched_ngram_and_propose_tokens

    def propose(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
        array = np.array(tokens, dtype=np.int32)
        return [int(token) for token in search(array, min_n, max_n, len(tokens) + k, k)]

    return propose


@given(tokens=vllm_contexts, between=lengths, k=st.integers(1, 5))
def test_equals_vllm_where_the_occurrence_is_unique(
    vllm_propose: Callable[..., list[int]], tokens: list[int], between: tuple[int, int], k: int
) -> None:
    match = find_ngram(tokens, *between)
    assume(match is None or len(earlier_ends(tokens, match.length)) == 1)
    assert propose_ngram(tokens, *between, k) == vllm_propose(tokens, *between, k)


@given(tokens=vllm_contexts, between=lengths, k=st.integers(1, 5))
def test_vllm_differs_only_by_taking_the_first_occurrence(
    vllm_propose: Callable[..., list[int]], tokens: list[int], between: tuple[int, int], k: int
) -> None:
    expected = brute_force(tokens, *between, k, pick=min)
    assert vllm_propose(tokens, *between, k) == expected


def test_vllm_and_we_disagree_on_a_repeated_occurrence(
    vllm_propose: Callable[..., list[int]],
) -> None:
    tokens = [1, 2, 7, 1, 2, 8, 1, 2]
    assert vllm_propose(tokens, 1, 2, 1) == [7]
    assert propose_ngram(tokens, 1, 2, 1) == [8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, 2, 1), "min_n: found 0, allowed an integer >= 1"),
        ((1, 0, 1), "max_n: found 0, allowed an integer >= 1"),
        ((3, 2, 1), r"max_n: found 2, allowed at least min_n \(3\)"),
        ((1, 2, -1), "k: found -1, allowed an integer >= 0"),
        ((1.0, 2, 1), "min_n: found 1.0, allowed an integer >= 1"),
        ((True, 2, 1), "min_n: found True"),
        ((1, 2, "4"), "k: found '4'"),
    ],
)
def test_bad_settings_are_refused(settings: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        NgramDrafter(*settings)
    with pytest.raises(ArgumentError, match=message):
        propose_ngram([1, 2, 1], *settings)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1, 2], r"tokens\[1\]: found -1, allowed token ids >= 0"),
        ([[1, 2]], "tokens: found 2 dimensions, allowed 1 dimension"),
        ([1.5, 2.0], "tokens: found dtype float64, allowed integer token ids"),
        ([True, False], "tokens: found dtype bool"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "tokens: found a tensor on meta"),
    ],
)
def test_bad_tokens_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        NgramDrafter(1, 2, 1).propose(tokens)


def test_drafter_is_frozen_and_compares_by_value() -> None:
    drafter = NgramDrafter(min_n=1, max_n=3, k=4)
    assert drafter == NgramDrafter(1, 3, 4)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        drafter.k = 5  # type: ignore[misc]  # the assignment is what must fail

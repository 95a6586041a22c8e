from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drafter_support import run
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import (
    ArgumentError,
    NgramIndex,
    NgramMatch,
    PromptLookupDrafter,
    SequenceState,
    SuffixAutomaton,
    SuffixDrafter,
    find_ngram,
    propose_ngram,
)

# Few distinct tokens, so that text repeats, overlaps and nests often.
texts = st.integers(1, 4).flatmap(
    lambda vocabulary: st.lists(st.integers(0, vocabulary - 1), max_size=40)
)
lengths = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: (pair[0], sum(pair)))
pieces = st.lists(st.integers(1, 7), min_size=1, max_size=40)


def learn(index: Any, tokens: list[int], sizes: list[int]) -> Any:
    """Learn in pieces of the given sizes, then the rest at once."""
    start = 0
    for size in [*sizes, len(tokens)]:
        part = tokens[start : start + size]
        index.extend(np.array(part, dtype=np.int64))
        start += len(part)
    assert len(index) == len(tokens)
    return index


@given(texts, st.integers(0, 8), lengths, pieces)
def test_the_index_finds_what_a_scan_of_the_context_finds(
    tokens: list[int], assumed: int, between: tuple[int, int], sizes: list[int]
) -> None:
    split = max(len(tokens) - assumed, 0)
    index = learn(NgramIndex(*between), tokens[:split], sizes)
    assert index.find(tokens[split:]) == find_ngram(tokens, *between)


def repeated_suffix(tokens: list[int]) -> NgramMatch | None:
    """The longest suffix that occurred before and its newest earlier end, by comparing slices."""
    size = len(tokens)
    for length in range(size - 1, 0, -1):
        for end in range(size - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[size - length :]:
                return NgramMatch(length, end)
    return None


@given(texts.map(lambda tokens: tokens[:16]), pieces)
def test_the_automaton_finds_the_longest_and_newest(tokens: list[int], sizes: list[int]) -> None:
    """Texts with at most 16 repeated suffixes: the newest occurrence is exact."""
    automaton = learn(SuffixAutomaton(), tokens, sizes)
    assert automaton.find() == repeated_suffix(tokens)


@given(texts, pieces)
def test_the_automaton_finds_a_longest_occurrence(tokens: list[int], sizes: list[int]) -> None:
    automaton = learn(SuffixAutomaton(), tokens, sizes)
    found, expected = automaton.find(), repeated_suffix(tokens)
    assert (found is None) == (expected is None)
    assert automaton.num_states <= 2 * max(len(tokens), 1)
    if found is not None and expected is not None:
        assert found.length == expected.length
        assert found.end < len(tokens)
        suffix = tokens[len(tokens) - found.length :]
        assert tokens[found.end - found.length : found.end] == suffix


@given(texts, texts.map(lambda tokens: tokens[:6]).filter(bool))
def test_assumed_tokens_are_matched_in_the_learned_text(
    tokens: list[int], assumed: list[int]
) -> None:
    automaton = learn(SuffixAutomaton(), tokens, [])
    whole = tokens + assumed
    ends = {
        (length, end)
        for end in range(1, len(tokens) + 1)
        for length in range(1, end + 1)
        if tokens[end - length : end] == whole[len(whole) - length :]
    }
    found = automaton.find(assumed)
    assert (found is None) == (not ends)
    if found is not None:
        assert (found.length, found.end) in ends
        assert found.length == max(length for length, _ in ends)
    assert automaton.find() == learn(SuffixAutomaton(), tokens, []).find()  # nothing was learned


def test_a_wrong_match_is_told_apart() -> None:
    """The comparisons see an index that learned another text."""
    tokens = [1, 2, 3, 9, 1, 2]
    assert learn(SuffixAutomaton(), tokens, []).find() == NgramMatch(2, 2)
    assert learn(SuffixAutomaton(), [1, 2, 3, 9, 2, 1], []).find() != NgramMatch(2, 2)
    assert learn(NgramIndex(1, 3), [1, 2, 1, 2], []).find() == NgramMatch(2, 2)


DRAFTERS = {"ngram": PromptLookupDrafter, "suffix": SuffixDrafter}


def proposals(drafter: Any, *states: SequenceState, k: int = 4) -> list[tuple[int, ...]]:
    return [proposal.tokens for proposal in run(drafter.propose, states, k)]


@given(texts.filter(bool), lengths, st.integers(1, 6), st.integers(0, 6))
def test_prompt_lookup_proposes_what_the_plain_function_proposes(
    tokens: list[int], between: tuple[int, int], k: int, assumed: int
) -> None:
    drafter = PromptLookupDrafter(*between)
    state = SequenceState.of(tokens)
    expected = propose_ngram(tokens, *between, k)
    assert proposals(drafter, state, k=k) == [tuple(expected)]
    ahead = state.assume(tokens[:assumed])
    expected = propose_ngram([*tokens, *tokens[:assumed]], *between, k)
    assert proposals(drafter, ahead, k=k) == [tuple(expected)]


@pytest.mark.parametrize("name", DRAFTERS)
@given(texts.filter(bool), st.lists(texts.map(lambda tokens: tokens[:5]), max_size=6))
def test_a_growing_sequence_is_drafted_as_a_new_one(
    name: str, tokens: list[int], steps: list[list[int]]
) -> None:
    """Drafting ahead in between, another sequence beside it: the state never leaks."""
    drafter = DRAFTERS[name]()
    state = SequenceState.of(tokens, 1)
    other = SequenceState.of([3, 3, 1, 3], 2)
    for step in steps:
        fresh = SequenceState.of(state.verified, 9)
        assert proposals(drafter, state, other)[0] == proposals(DRAFTERS[name](), fresh)[0]
        proposals(drafter, state.assume(step))
        state.origin.buffer.append(step)
        state = SequenceState(state.origin, state.length + len(step))


@pytest.mark.parametrize("name", DRAFTERS)
def test_states_are_dropped_and_never_mixed_up(name: str) -> None:
    drafter = DRAFTERS[name]()
    assert proposals(drafter, SequenceState.of([1, 2, 3, 1, 2], 5)) == [(3, 1, 2)]
    assert proposals(drafter, SequenceState.of([1, 2, 9, 9, 1, 2], 5)) == [(9, 9, 1, 2)]
    assert drafter.sequence_ids == {5}
    drafter.forget(5)
    drafter.forget(6)
    assert drafter.sequence_ids == frozenset()


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_older_state_of_a_sequence_is_drafted_from_its_own_text(name: str) -> None:
    drafter = DRAFTERS[name]()
    state = SequenceState.of([1, 2, 3, 1, 2, 7, 8, 1, 2])
    assert proposals(drafter, state) == [(7, 8, 1, 2)]
    assert proposals(drafter, state.at(5)) == [(3, 1, 2)]
    assert proposals(drafter, state) == [(7, 8, 1, 2)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_long_prompt_is_learned_in_turns(name: str) -> None:
    """Learning lets other tasks run, so that a long prompt does not hold up the event loop."""
    import anyio

    tokens = np.random.default_rng(0).integers(0, 50_000, 30_000)
    tokens[100:104] = tokens[-4:] = [50_001, 50_002, 50_003, 50_004]
    turns = 0

    async def others(scope: anyio.CancelScope) -> None:
        nonlocal turns
        with scope:
            while True:
                turns += 1
                await anyio.sleep(0)

    async def main() -> list[Any]:
        scope = anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(others, scope)
            found = await DRAFTERS[name]().propose([SequenceState.of(tokens)], 3)
            scope.cancel()
        return list(found)

    assert run(main)[0].tokens == tuple(tokens[104:107].tolist())
    assert turns >= 3


def test_a_shortest_match_is_respected() -> None:
    state = SequenceState.of([1, 2, 3, 9, 1, 2])
    assert proposals(SuffixDrafter(min_match=2), state) == [(3, 9, 1, 2)]
    assert proposals(SuffixDrafter(min_match=3), state) == [()]
    assert proposals(PromptLookupDrafter(3, 4), state) == [()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookupDrafter(0, 2), "min_n: found 0"),
        (lambda: PromptLookupDrafter(3, 2), "max_n: found 2"),
        (lambda: NgramIndex(2, 1), "max_n: found 1"),
        (lambda: SuffixDrafter(0), "min_match: found 0, allowed an integer >= 1"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()

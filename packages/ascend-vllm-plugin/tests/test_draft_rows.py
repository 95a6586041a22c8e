"""Recognising sequences in a batch whose rows move, end, pause and look alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import SequenceState
from ascend_vllm_plugin.draft_rows import KEPT_STEPS, FollowedSequences, Prediction


def follow(followed, rows):
    """One step: rows are (tokens, how many of them are new)."""
    tokens = np.full((len(rows) + 1, 256), 7, dtype=np.int32)
    lengths = np.zeros(len(rows) + 1, dtype=np.int32)
    for index, (row, _) in enumerate(rows):
        tokens[index, : len(row)] = row
        lengths[index] = len(row)
    sampled = [row[len(row) - new :] for row, new in rows]
    return followed.follow(sampled, lengths, tokens)


def test_a_sequence_is_found_in_another_row():
    followed = FollowedSequences()
    (first, second), _ = follow(followed, [([1, 2, 3], 1), ([4, 5, 6], 1)])
    (found,), gone = follow(followed, [([4, 5, 6, 7, 8], 2)])
    assert found is second
    assert (found.row, found.sampled, found.is_new, gone) == (0, 2, False, [])
    assert first.absent == 1


def test_rows_that_look_alike_are_two_sequences():
    followed = FollowedSequences()
    (first, second), _ = follow(followed, [([1, 2], 1), ([1, 2], 1)])
    assert first is not second
    again, _ = follow(followed, [([1, 2, 3], 1), ([1, 2, 4], 1)])
    assert again == [first, second]


@pytest.mark.parametrize("row", [[1, 2, 9, 4], [1, 2, 3, 4, 5], [1, 2]])
def test_other_tokens_or_a_gap_are_another_sequence(row):
    followed = FollowedSequences()
    (known,), _ = follow(followed, [([1, 2, 3], 1)])
    (found,), _ = follow(followed, [(row, 1)])
    assert found is not known
    assert found.is_new


def test_a_sequence_is_forgotten_after_some_steps_without_a_row():
    followed = FollowedSequences()
    (known,), _ = follow(followed, [([1, 2, 3], 1)])
    for _ in range(KEPT_STEPS):
        assert follow(followed, []) == ([], [])
    assert follow(followed, []) == ([], [known.state.sequence_id])
    assert len(followed) == 0


def test_a_paused_sequence_is_found_again():
    followed = FollowedSequences()
    (known,), _ = follow(followed, [([1, 2, 3], 1)])
    for _ in range(KEPT_STEPS):
        follow(followed, [])
    assert follow(followed, [([1, 2, 3, 4], 1)])[0] == [known]
    assert known.absent == 0


@pytest.mark.parametrize(
    ("tokens", "rest"),
    [([1, 2], (5, 6, 7)), ([1, 2, 5], (6, 7)), ([1, 2, 5, 6, 7], ()), ([1, 2, 9], ())],
)
def test_what_is_left_of_a_prediction(tokens, rest):
    assert Prediction(2, (5, 6, 7)).rest(SequenceState.of(tokens)) == rest


@given(st.data())
def test_every_row_is_followed_by_a_sequence_of_its_own_tokens(data):
    followed, live = FollowedSequences(), []
    for _ in range(data.draw(st.integers(1, 8))):
        live = data.draw(st.permutations(live))[: data.draw(st.integers(0, 4))]
        grown = [(row, data.draw(st.lists(st.integers(0, 1), max_size=3))) for row in live]
        begun = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=2))
        rows = [([*row, *new], len(new)) for row, new in grown] + [(row, 1) for row in begun]
        found, _ = follow(followed, rows)
        present = [one for one in found if one is not None]
        assert len({id(one) for one in present}) == len(present)
        for (row, new), one in zip(rows, found, strict=True):
            assert (one is None) == (new == 0)
            if one is not None:
                assert one.state.verified.tolist() == row
        live = [row for row, _ in rows]

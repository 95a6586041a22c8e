from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_specdecode import ArgumentError, DraftVocabulary


def test_ids_and_probabilities_are_those_of_the_target() -> None:
    vocabulary = DraftVocabulary(torch.tensor([7, 0, 4]), 9)
    assert vocabulary.tokens(torch.tensor([[0, 2], [1, 1]])).tolist() == [[7, 4], [0, 0]]
    found = vocabulary.probabilities(torch.tensor([[0.5, 0.25, 0.25]]))
    assert found.tolist() == [[0.25, 0, 0, 0, 0.25, 0, 0, 0.5, 0]]


def test_offsets_of_a_checkpoint_are_added_to_the_draft_id() -> None:
    vocabulary = DraftVocabulary.from_d2t(torch.tensor([3, 3, 6, 6], dtype=torch.int32), 10)
    assert vocabulary.target_ids.tolist() == [3, 4, 8, 9]
    assert vocabulary.target_ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        (torch.tensor([0, 5]), 5, r"target_ids: found 5, allowed token ids 0..V-1 \(V = 5\)"),
        (torch.tensor([-1, 2]), 5, "target_ids: found -1"),
        (torch.tensor([2, 1, 2]), 5, "target_ids: found an id twice, allowed each id once"),
        (torch.tensor([[1]]), 5, r"target_ids: found shape \[1, 1\]"),
        (torch.tensor([], dtype=torch.int64), 5, "allowed shape .* D >= 1"),
        (torch.tensor([1.0]), 5, "target_ids: .*float32"),
    ],
)
def test_bad_maps_are_refused(ids: torch.Tensor, size: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DraftVocabulary(ids, size)


def test_a_head_of_another_size_is_refused() -> None:
    vocabulary: Any = DraftVocabulary(torch.tensor([1, 2]), 5)
    with pytest.raises(ArgumentError, match="draft logits: found 5 logits per token, allowed 2"):
        vocabulary.probabilities(torch.zeros(1, 5))

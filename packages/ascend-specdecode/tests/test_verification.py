from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import PAD_TOKEN, ArgumentError, verify_greedy


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Requests with different k; a small vocabulary makes drafts agree often."""
    batch, width = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    token = st.integers(0, 1)
    row = st.lists(token, min_size=width, max_size=width)
    wide_row = st.lists(token, min_size=width + 1, max_size=width + 1)
    drafts = draw(st.lists(row, min_size=batch, max_size=batch))
    targets = draw(st.lists(wide_row, min_size=batch, max_size=batch))
    counts = draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch))
    return drafts, targets, counts


def verify_one(draft: list[int], target: list[int], count: int) -> list[int]:
    emitted = []
    for position in range(count + 1):
        emitted.append(target[position])
        if position == count or draft[position] != target[position]:
            break
    return emitted + [-1] * (len(target) - len(emitted))


def as_tensors(
    drafts: list[list[int]], targets: list[list[int]], counts: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, width = len(drafts), len(drafts[0]) if drafts else 3
    return (
        torch.tensor(drafts, dtype=dtype).reshape(batch, width),
        torch.tensor(targets, dtype=dtype).reshape(batch, width + 1),
        torch.tensor(counts, dtype=dtype),
    )


@given(batches(), st.sampled_from([torch.int32, torch.int64]))
def test_equals_a_plain_loop(
    batch: tuple[list[list[int]], list[list[int]], list[int]], dtype: torch.dtype
) -> None:
    tensors = as_tensors(*batch, dtype)
    expected = [verify_one(*row) for row in zip(*batch, strict=True)]
    tokens = verify_greedy(*tensors)
    assert tokens.dtype == torch.int64
    assert tokens.shape == tensors[1].shape
    assert tokens.tolist() == expected


@given(batches(), st.integers(-9, 9))
def test_entries_after_the_drafted_ones_are_ignored(
    batch: tuple[list[list[int]], list[list[int]], list[int]], filler: int
) -> None:
    drafts, targets, counts = as_tensors(*batch, torch.int64)
    expected = verify_greedy(drafts, targets, counts)
    step = torch.arange(targets.shape[1])
    other_targets = torch.where(step > counts.unsqueeze(1), filler, targets)
    other_drafts = torch.where(step[:-1] >= counts.unsqueeze(1), filler, drafts)
    assert torch.equal(verify_greedy(other_drafts, other_targets, counts), expected)


def test_one_row_of_each_kind() -> None:
    drafts = torch.tensor([[5, 6, 7], [5, 9, 7], [9, 6, 7], [5, 6, 7], [5, 6, 7]])
    targets = torch.tensor([[5, 6, 7, 8]] * 5)
    counts = torch.tensor([3, 3, 3, 2, 0])
    assert verify_greedy(drafts, targets, counts).tolist() == [
        [5, 6, 7, 8],  # all right: three accepted and the bonus token
        [5, 6, -1, -1],  # second wrong: replaced by the target's own
        [5, -1, -1, -1],  # first wrong
        [5, 6, 7, -1],  # two drafted, both right, bonus token
        [5, -1, -1, -1],  # nothing drafted: plain decoding
    ]
    assert PAD_TOKEN == -1


def test_inputs_are_left_alone() -> None:
    tensors = as_tensors([[1, 0]], [[1, 1, 0]], [2], torch.int64)
    copies = [tensor.clone() for tensor in tensors]
    output = verify_greedy(*tensors)
    output.fill_(77)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_reads_no_value_on_a_device() -> None:
    """A meta tensor has no values: any read back to the host would raise."""
    with torch.device("meta"):
        tokens = verify_greedy(
            torch.zeros(4, 3, dtype=torch.int64),
            torch.zeros(4, 4, dtype=torch.int64),
            torch.zeros(4, dtype=torch.int64),
        )
    assert tokens.shape == (4, 4)
    assert tokens.device.type == "meta"


GOOD: dict[str, Any] = {
    "draft_tokens": torch.zeros(2, 3, dtype=torch.int64),
    "target_argmax": torch.zeros(2, 4, dtype=torch.int64),
    "num_draft_tokens": torch.tensor([3, 0]),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("draft_tokens", torch.zeros(6).long(), r"draft_tokens: found shape \[6\]"),
        ("target_argmax", torch.zeros(2, 3).long(), r"target_argmax: found shape \[2, 3\], .*4\]"),
        ("num_draft_tokens", torch.zeros(3).long(), r"num_draft_tokens: found shape \[3\]"),
        ("draft_tokens", torch.zeros(2, 3), "draft_tokens.dtype: found torch.float32"),
        ("target_argmax", torch.zeros(2, 4), "target_argmax.dtype: found torch.float32"),
        ("num_draft_tokens", torch.zeros(2).bool(), "num_draft_tokens.dtype: found torch.bool"),
        ("target_argmax", torch.zeros(2, 4, device="meta").long(), "target_argmax.device: .*meta"),
        ("num_draft_tokens", torch.tensor([0, 4]), r"num_draft_tokens\[1\]: found 4, .*K = 3"),
        ("num_draft_tokens", torch.tensor([-1, 0]), r"num_draft_tokens\[0\]: found -1"),
        ("target_argmax", torch.full((2, 4), -1), r"target_argmax\[0, 0\]: found -1"),
    ],
)
def test_bad_input_is_refused(name: str, value: torch.Tensor, message: str) -> None:
    assert verify_greedy(**GOOD).tolist() == [[0, 0, 0, 0], [0, -1, -1, -1]]
    with pytest.raises(ArgumentError, match=message):
        verify_greedy(**{**GOOD, name: value})

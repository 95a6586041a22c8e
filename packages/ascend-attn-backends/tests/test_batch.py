from __future__ import annotations

import attrs
import pytest
import torch
from attn_backends_support import steps
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import AttentionBatch, AttentionBatchError


def small(**changes: object) -> AttentionBatch:
    """Two requests: 3 of 5 keys, 1 of 17 keys; blocks of 16."""
    return attrs.evolve(AttentionBatch.from_lengths([3, 1], [5, 17], 16), **changes)


def test_from_lengths() -> None:
    batch = small()
    assert batch.query_start_loc.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [5, 17]
    assert batch.block_table.tolist() == [[0, 0], [1, 2]]
    assert batch.slot_mapping.tolist() == [2, 3, 4, 2 * 16]
    assert (batch.num_reqs, batch.num_tokens) == (2, 4)
    assert (batch.max_query_len, batch.max_seq_len) == (3, 17)
    assert batch.slot_mapping.dtype == torch.int64
    batch.validate(block_size=16, num_blocks=3)


def test_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        small().num_reqs = 3


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (([1], [1, 2]), "seq_lens: found 2 rows; allowed: 1 rows"),
        (([1, -1], [1, 2]), r"query_lens\[1\]: found -1; allowed: at least 0"),
        (([1, 3], [1, 2]), r"seq_lens\[1\]: found 2; allowed: at least the 3 query tokens"),
    ],
)
def test_from_lengths_refuses(lengths: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(AttentionBatchError, match=message):
        AttentionBatch.from_lengths(*lengths, 16)


STRUCTURE = {
    "query_start_loc": (torch.zeros(2, dtype=torch.int32), r"torch.int32 \[2\]", r"\[3\]"),
    "seq_lens": (torch.zeros(2), r"torch.float32 \[2\]", r"torch.int32 \[2\]"),
    "block_table": (torch.zeros(3, 2, dtype=torch.int32), r"\[3, 2\]", r"\[2, 'any'\]"),
    "slot_mapping": (torch.zeros(4, dtype=torch.int32), "torch.int32", "torch.int64"),
    "causal": (torch.ones(3, dtype=torch.bool), r"\[3\]", r"torch.bool \[2\]"),
    "query_start_loc_cpu": (torch.zeros(3), "float32", "int32"),
    "seq_lens_cpu": (torch.zeros(2, dtype=torch.int32, device="meta"), "meta", "host memory"),
    "causal_cpu": (torch.zeros(2), "float32", "bool"),
    "is_prefilling": (torch.zeros(1, dtype=torch.bool), r"\[1\]", r"\[2\]"),
    "num_reqs": (-1, "-1", "at least 0"),
    "num_padded_tokens": (-1, "-1", "at least 0"),
}


@pytest.mark.parametrize("field", STRUCTURE)
def test_structure_is_checked_when_made(field: str) -> None:
    value, found, allowed = STRUCTURE[field]
    with pytest.raises(AttentionBatchError, match=f"^{field}: found .*{found}.*; .*{allowed}"):
        small(**{field: value})


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


VALUES = {
    "first start": ({"query_start_loc": ints(1, 3, 4)}, r"query_start_loc\[0\]", "1"),
    "falling start": ({"query_start_loc": ints(0, 5, 4)}, r"query_start_loc\[2\]", "4"),
    "last start": ({"query_start_loc": ints(0, 3, 3)}, r"query_start_loc\[2\]", "3"),
    "short row": ({"seq_lens": ints(2, 17)}, r"seq_lens\[0\]", "2"),
    "query bound": ({"max_query_len": 2}, "max_query_len", "2"),
    "key bound": ({"max_seq_len": 16}, "max_seq_len", "16"),
    "slot twice": ({"slot_mapping": torch.tensor([2, 3, 3, 32])}, r"slot_mapping\[2\]", "3"),
    "slot outside": ({"slot_mapping": torch.tensor([2, 3, 4, 48])}, r"slot_mapping\[3\]", "48"),
    "block outside": ({"block_table": ints(0, 0, 1, 3).view(2, 2)}, r"block_table\[1, 1\]", "3"),
    "narrow table": ({"block_table": ints(0, 1).view(2, 1)}, "block_table", "1 columns"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_checked_on_request(name: str) -> None:
    changes, field, found = VALUES[name]
    if {"query_start_loc", "seq_lens"} & changes.keys():
        changes = {**changes, "query_start_loc_cpu": None, "seq_lens_cpu": None}
    broken = small(**changes)
    with pytest.raises(AttentionBatchError, match=f"^{field}: found {found}; allowed: "):
        broken.validate(block_size=16, num_blocks=3)


@pytest.mark.parametrize(
    ("field", "host"), [("query_start_loc", ints(0, 2, 4)), ("seq_lens", ints(5, 16))]
)
def test_host_copy_must_equal_the_device(field: str, host: torch.Tensor) -> None:
    with pytest.raises(AttentionBatchError, match=rf"^{field}_cpu\[1\]: found .* as in {field}"):
        small(**{f"{field}_cpu": host}).validate()


def test_tokens_that_no_request_owns_are_never_written() -> None:
    """Engines count padding tokens among the real ones; their slots tell."""
    short = {"query_start_loc": ints(0, 3, 3), "query_start_loc_cpu": None}
    slots = torch.tensor([2, 3, 4, -1])
    small(**short, slot_mapping=slots).validate(block_size=16, num_blocks=3)
    with pytest.raises(
        AttentionBatchError, match=r"^query_start_loc\[2\]: found 3; allowed: 4, or"
    ):
        small(**short).validate()


def test_padding_grows_every_field() -> None:
    batch = small(is_prefilling=torch.tensor([True, False])).padded(4, 8)
    assert (batch.num_reqs, batch.num_padded_reqs) == (2, 2)
    assert (batch.num_tokens, batch.num_padded_tokens) == (4, 4)
    assert batch.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    assert batch.query_start_loc_cpu.tolist() == [0, 3, 4, 4, 4]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [5, 17, 0, 0]
    assert batch.block_table.tolist()[2:] == [[0, 0], [0, 0]]
    assert batch.slot_mapping.tolist() == [2, 3, 4, 32, -1, -1, -1, -1]
    assert batch.is_prefilling.tolist() == [True, False, False, False]
    batch.validate(block_size=16, num_blocks=3)


@pytest.mark.parametrize(("rows", "tokens", "field"), [(1, 4, "num_rows"), (2, 3, "num_token_")])
def test_padding_never_shrinks(rows: int, tokens: int, field: str) -> None:
    with pytest.raises(AttentionBatchError, match=f"^{field}.*: found"):
        small().padded(rows, tokens)


def test_padding_rows_that_claim_keys_or_slots_are_refused() -> None:
    batch = small(query_start_loc_cpu=None, seq_lens_cpu=None).padded(3, 5)
    with pytest.raises(AttentionBatchError, match=r"seq_lens\[2\]: found 1; allowed: 0 in a pad"):
        attrs.evolve(batch, seq_lens=ints(5, 17, 1)).validate()
    slots = batch.slot_mapping.clone()
    slots[4] = 7
    with pytest.raises(AttentionBatchError, match=r"slot_mapping\[4\]: found 7; allowed: negative"):
        attrs.evolve(batch, slot_mapping=slots).validate()


@given(steps(), st.integers(0, 5), st.integers(0, 9), st.sampled_from([1, 16, 128]))
def test_any_step_and_any_padding_keeps_the_invariants(
    step: tuple[list[int], list[int]], more_rows: int, more_tokens: int, block_size: int
) -> None:
    plain = AttentionBatch.from_lengths(*step, block_size)
    batch = plain.padded(plain.num_rows + more_rows, plain.num_token_rows + more_tokens)
    starts = batch.query_start_loc.tolist()
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[-1] == batch.num_tokens == sum(step[0])
    rows = {batch.num_rows, len(batch.seq_lens), len(batch.block_table), len(starts) - 1}
    assert rows == {len(step[0]) + more_rows}
    assert min(batch.seq_lens.tolist()) >= 0
    assert batch.slot_mapping[batch.num_tokens :].tolist() == [-1] * more_tokens
    batch.validate(block_size=block_size, num_blocks=int(batch.block_table.max()) + 1)


@given(steps(), st.sampled_from([1, 16, 128]))
def test_slots_follow_the_block_table(step: tuple[list[int], list[int]], block_size: int) -> None:
    batch = AttentionBatch.from_lengths(*step, block_size)
    slots = iter(batch.slot_mapping.tolist())
    for row, (query_len, seq_len) in enumerate(zip(*step, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            block = int(batch.block_table[row, position // block_size])
            assert next(slots) == block * block_size + position % block_size
    assert next(slots, None) is None


def test_dummy_batch_is_valid() -> None:
    batch = AttentionBatch.dummy(num_reqs=4, query_len=2, max_blocks=3)
    batch.validate(block_size=16, num_blocks=1)
    assert batch.slot_mapping.tolist() == [-1] * 8
    assert torch.count_nonzero(batch.block_table) == 0

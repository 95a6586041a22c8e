"""Public bug reports of systems of this kind, as small cases of captured decode steps.

| row | report |
|----:|---|
| 6 | vllm-ascend 8033: the positions of a replay were not at the captured address |
| 22 | vllm-ascend 11774, 9818, 10901: an idle run read what the request before it had left |
| 29 | vllm-ascend 8508: a captured block table was replaced instead of written |
| 32 | vllm-ascend 11266, 12605: capture and replay with different mask modes |
| 51 | vllm-ascend 10895: a layer's shorter key count was not renewed at replay |
"""

from __future__ import annotations

import attrs
import pytest
import torch
from graph_support import (
    WIDTH,
    Captured,
    LayerKind,
    Model,
    decode_batch,
    positions_of,
)

from ascend_attn_backends import (
    PAD_SLOT,
    AttentionBatch,
    CaptureSizes,
    FusedInferAttentionGraphParam,
    InvalidFieldError,
    MaskMode,
)

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
OPERATORS = ["paged", "fia"]


def pair(kinds: list[LayerKind], sizes: list[int], query_len: int) -> tuple[Captured, Model]:
    captured, eager = Captured(Model(kinds), CaptureSizes(sizes, query_len)), Model(kinds)
    captured.model.fill()
    eager.fill()
    return captured, eager


def both_ways(
    captured: Captured,
    eager: Model,
    positions: torch.Tensor,
    batches: dict[str, AttentionBatch],
    *,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(replayed, eager) results of the real tokens."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(positions), WIDTH, generator=g)
    found = captured.replay(hidden, positions, batches)
    return found[: len(positions)].clone(), eager.eager(hidden, positions, batches)


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_case_06_positions_are_written_where_the_graph_reads_them(k: int) -> None:
    """The step's view of the positions is the buffer itself, for every size and step."""
    captured, eager = pair([LayerKind("a", "")], [k + 1, 2 * (k + 1)], k + 1)
    buffer = captured.params.step(2 * (k + 1)).positions
    address = buffer.data_ptr()
    for number, keys in enumerate((k + 1, 40, 90, 23)):
        requests = [(keys, [1, 2, 3, 4, 5, 6])]
        positions = positions_of(requests, k + 1)
        found, expected = both_ways(
            captured, eager, positions, {"": decode_batch(requests, k + 1)}, seed=number
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert buffer.data_ptr() == address
        assert buffer[: k + 1].tolist() == list(range(keys - k - 1, keys))
        assert captured.params.step(k + 1).positions.data_ptr() == address


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("size", [4, 8])
def test_case_22_an_idle_replay_reads_and_writes_nothing_of_a_request(
    operator: str, size: int
) -> None:
    """A real batch, then an idle run, of the same and of another captured size."""
    captured, eager = pair([LayerKind("a", "", operator)], [4, 8], 1)
    requests = [(20 + row, [2 * row + 1, 2 * row + 2]) for row in range(size)]
    both_ways(captured, eager, positions_of(requests, 1), {"": decode_batch(requests, 1)})
    before = [cache.clone() for cache in captured.model.layers[0].caches]
    for idle in (4, 8):
        step = captured.params.step(idle)
        step.clear()
        buffers = step.buffers[""]
        assert buffers.slot_mapping.tolist() == [PAD_SLOT] * idle
        assert not buffers.block_table.any()
        assert not buffers.token_block_table.any()
        assert buffers.host_seq_lens() == [0] * idle
        assert not step.positions.any()
        assert captured.run(step, torch.randn(idle, WIDTH)).isfinite().all()
        for cache, saved in zip(captured.model.layers[0].caches, before, strict=True):
            assert torch.equal(cache, saved)
    found, expected = both_ways(
        captured, eager, positions_of(requests, 1), {"": decode_batch(requests, 1)}, seed=1
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("operator", OPERATORS)
def test_case_22_rows_of_the_request_before_are_cleared(operator: str) -> None:
    """Many requests, then few, in one captured size: what is not theirs is padding."""
    captured, eager = pair([LayerKind("a", "", operator)], [8], 2)
    for rows in (4, 1, 3):
        requests = [(30 + row, [3 * row + 1, 3 * row + 2]) for row in range(rows)]
        found, expected = both_ways(
            captured, eager, positions_of(requests, 2), {"": decode_batch(requests, 2)}, seed=rows
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)
        buffers = captured.params.step(8).buffers[""]
        assert not buffers.block_table[rows:].any()
        assert not buffers.seq_lens[rows:].any()
        assert buffers.slot_mapping[2 * rows :].tolist() == [PAD_SLOT] * (8 - 2 * rows)
        for ours, theirs in zip(
            captured.model.layers[0].caches, eager.layers[0].caches, strict=True
        ):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("window", [4, None])
def test_case_29_a_captured_block_table_is_written_not_replaced(window: int | None) -> None:
    """Window 4 and 10 keys, replayed with other blocks each time."""
    captured, eager = pair([LayerKind("a", "", "fia", window)], [1], 1)
    table = captured.params.step(1).buffers[""].block_table
    for number, blocks in enumerate(([3], [9], [7])):
        found, expected = both_ways(
            captured, eager, torch.tensor([9]), {"": decode_batch([(10, blocks)], 1)}, seed=number
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert captured.params.step(1).buffers[""].block_table is table
        assert table[0, 0] == blocks[0]


def test_case_29_control_a_replaced_block_table_shows() -> None:
    captured, eager = pair([LayerKind("a", "", "paged")], [1], 1)
    captured.skip = {"a"}
    batches = {"": decode_batch([(10, [3])], 1)}
    found, expected = both_ways(captured, eager, torch.tensor([9]), batches)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    buffers = captured.params.step(1).buffers[""]
    for name in ("block_table", "token_block_table"):
        object.__setattr__(buffers, name, buffers.block_table.clone())
    batches = {"": decode_batch([(10, [9])], 1)}
    found, expected = both_ways(captured, eager, torch.tensor([9]), batches)
    assert not torch.allclose(found, expected, **TOLERANCE)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("k", range(1, 9))
def test_case_32_verification_of_k_drafts_stays_causal_when_replayed(k: int, operator: str) -> None:
    captured, eager = pair([LayerKind("a", "", operator)], [2 * (k + 1)], k + 1)
    requests = [(20, [1, 2]), (k + 1, [3])]
    positions, batches = positions_of(requests, k + 1), {"": decode_batch(requests, k + 1)}
    found, expected = both_ways(captured, eager, positions, batches)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    without = {"": attrs.evolve(batches[""], causal=False)}
    hidden = torch.randn(2 * (k + 1), WIDTH, generator=torch.Generator().manual_seed(0))
    dropped = eager.eager(hidden, positions, without)
    assert not torch.allclose(found, dropped, **TOLERANCE)  # control


def test_case_32_a_replay_has_the_mask_mode_of_its_capture() -> None:
    """The mode is part of the record; no mask with several tokens per request is refused."""
    captured, eager = pair([LayerKind("a", "", "fia")], [4], 4)
    (param,) = captured.params.step(4).params
    assert isinstance(param, FusedInferAttentionGraphParam)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        param.mode = MaskMode(0)  # type: ignore[misc]
    with pytest.raises(InvalidFieldError, match="mode: found no mask with 4 tokens per request"):
        attrs.evolve(param, mode=MaskMode(0), atten_mask=None)
    object.__setattr__(param, "mode", MaskMode(0))  # control: what freezing prevents
    object.__setattr__(param, "atten_mask", None)
    requests = [(20, [1, 2])]
    found, expected = both_ways(
        captured, eager, positions_of(requests, 4), {"": decode_batch(requests, 4)}
    )
    assert not torch.allclose(found, expected, **TOLERANCE)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("long", "short"), [(90, 16), (16, 90), (33, 1)])
def test_case_51_each_layer_replays_its_own_key_count(operator: str, long: int, short: int) -> None:
    """Layer A has all keys of a request, layer B a cache that keeps the last ones only."""
    kinds = [LayerKind("A", "all", operator), LayerKind("B", "last", operator)]
    captured, eager = pair(kinds, [1, 2], 1)
    for number, (keys, kept) in enumerate(((long, short), (long - 1 or 1, short), (5, 3))):
        batches = {
            "all": decode_batch([(keys, [1, 2, 3, 4, 5, 6])], 1),
            "last": decode_batch([(kept, [11, 12, 13, 14, 15, 16])], 1),
        }
        found, expected = both_ways(captured, eager, torch.tensor([keys - 1]), batches, seed=number)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        step = captured.params.step(1)
        lens = {name: buffers.host_seq_lens() for name, buffers in step.buffers.items()}
        assert lens == {"all": [keys], "last": [kept]}


@pytest.mark.parametrize("layer", ["A", "B"])
def test_case_51_control_a_count_that_is_not_renewed_shows(layer: str) -> None:
    kinds = [LayerKind("A", "all"), LayerKind("B", "last")]
    captured, eager = pair(kinds, [1], 1)
    captured.skip = {layer}
    batches = {"all": decode_batch([(100 - 4, [1, 2, 3, 4, 5, 6])], 1),
               "last": decode_batch([(16, [11])], 1)}  # fmt: skip
    found, expected = both_ways(captured, eager, torch.tensor([95]), batches)
    assert not torch.allclose(found, expected, **TOLERANCE)

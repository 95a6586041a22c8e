"""Captured decode steps: a replay equals the eager step, and goes wrong when it should."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from graph_support import (
    BLOCK,
    MAX_BLOCKS,
    WIDTH,
    Captured,
    LayerKind,
    Model,
    Request,
    decode_batch,
    positions_of,
)
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    PAD_SLOT,
    AttentionBatch,
    AttentionBatchError,
    CacheGroup,
    CaptureSizes,
    DecodeBuffers,
    GraphParams,
    GraphParamSets,
    HostGraph,
    InvalidFieldError,
    PagedAttentionGraphParam,
    copy_into,
)

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
KINDS = [
    LayerKind("layers.0", "full", "paged"),
    LayerKind("layers.1", "window", "fia", window=9),
    LayerKind("layers.2", "full", "fia"),
]
Step = tuple[list[Request], list[Request]]
"""The requests of a step as the full layers and as the window layers see them."""


@st.composite
def decode_steps(draw: st.DrawFn, query_len: int, most: int) -> list[Step]:
    """Steps of changing requests; the groups have other blocks, and other numbers of keys."""
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(0, most))
        blocks = draw(st.permutations(range(1, 40)))
        halves, groups = (blocks[:20], blocks[20:]), []
        for pool in halves:
            used, requests = list(pool), []
            for _ in range(rows):
                keys = draw(st.integers(query_len, MAX_BLOCKS * BLOCK if rows < 4 else 48))
                need = -(-keys // BLOCK)
                requests.append((keys, [used.pop() for _ in range(need)]))
            groups.append(requests)
        steps.append((groups[0], groups[1]))
    return steps


def batches_of(step: Step, query_len: int) -> dict[str, AttentionBatch]:
    full, window = step
    return {"full": decode_batch(full, query_len), "window": decode_batch(window, query_len)}


def compare(
    captured: Captured, eager: Model, step: Step, query_len: int, seed: int, number: int = 0
) -> None:
    """One step both ways: results of real tokens, and every byte of the caches."""
    hidden = torch.randn(
        query_len * len(step[0]), WIDTH, generator=torch.Generator().manual_seed(seed)
    )
    positions = positions_of(step[0], query_len) if step[0] else torch.zeros(0, dtype=torch.int64)
    batches = batches_of(step, query_len)
    found = captured.replay(hidden, positions, batches, number)
    expected = eager.eager(hidden, positions, batches)
    torch.testing.assert_close(found[: len(hidden)], expected, **TOLERANCE)
    assert found.isfinite().all()
    for ours, theirs in zip(captured.model.layers, eager.layers, strict=True):
        for one, other in zip(ours.caches, theirs.caches, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def pair(sizes: Sequence[int], query_len: int, **options: Any) -> tuple[Captured, Model]:
    """A captured model and an eager one with the same weights and caches."""
    captured, eager = (
        Captured(Model(KINDS), CaptureSizes(sizes, query_len), **options),
        Model(KINDS),
    )
    captured.model.fill()
    eager.fill()
    return captured, eager


@given(st.integers(1, 9).flatmap(lambda q: st.tuples(st.just(q), decode_steps(q, 4))))
def test_any_decode_steps_replay_as_eager(drawn: tuple[int, list[Step]]) -> None:
    """Plain decoding and verification of k = 0 to 8 drafts, in the next captured size."""
    query_len, steps = drawn
    captured, eager = pair([query_len, 3 * query_len, 4 * query_len], query_len)
    for number, step in enumerate(steps):
        compare(captured, eager, step, query_len, number)


def test_each_size_is_captured_once_and_padded_to() -> None:
    captured, eager = pair([2, 4, 8], 2)
    for rows, size in ((1, 2), (2, 4), (3, 8), (4, 8)):
        step = [(20 + row, [3 * row + 1, 3 * row + 2]) for row in range(rows)]
        compare(captured, eager, (step, step), 2, rows)
        prepared = captured.params.prepare(batches_of((step, step), 2), positions_of(step, 2))
        assert prepared is captured.params.step(size)
    assert set(captured.graphs) == {(2, 0), (4, 0), (8, 0)}


class TestDraft:
    def test_steps_of_a_draft_have_memory_of_their_own(self) -> None:
        """Preparing step 2 before step 1 is replayed changes nothing of step 1."""
        captured, eager = pair([2], 1, role="draft", num_steps=3)
        first: Step = ([(20, [1, 2]), (9, [3])], [(20, [11, 12]), (9, [13])])
        later: Step = ([(21, [4, 5]), (10, [6])], [(21, [14, 15]), (10, [16])])
        hidden, positions = torch.randn(2, WIDTH), positions_of(first[0], 1)
        prepared = captured.params.prepare(batches_of(first, 1), positions, 0)
        captured.params.prepare(batches_of(later, 1), positions_of(later[0], 1), 1)
        found = captured.run(prepared, hidden)
        expected = eager.eager(hidden, positions, batches_of(first, 1))
        torch.testing.assert_close(found, expected, **TOLERANCE)
        for number in range(3):
            compare(captured, eager, later, 1, number, number)

    def test_target_and_draft_share_nothing(self) -> None:
        groups = {"": CacheGroup(16, 4)}
        target = GraphParams("target", CaptureSizes([4, 8], 4), groups)
        draft = GraphParams("draft", CaptureSizes([1, 2]), groups, num_steps=2)
        sets = GraphParamSets(target, draft)
        assert sets.of("target") is target
        assert sets.of("draft") is draft
        steps = [target.step(8), draft.step(2), draft.step(2, 1)]
        memory = [addresses(step) for step in steps]
        assert all(not one & other for one in memory for other in memory if one is not other)
        for step in steps:
            step.workspace(8)
        assert len({step.workspace(8).data_ptr() for step in steps}) == 3

    def test_a_set_in_the_wrong_place_is_named(self) -> None:
        draft = GraphParams("draft", CaptureSizes([1]), {"": CacheGroup(16, 4)})
        with pytest.raises(InvalidFieldError, match="target: found the set of a draft"):
            GraphParamSets(draft)
        target = GraphParams("target", CaptureSizes([1]), {"": CacheGroup(16, 4)})
        with pytest.raises(InvalidFieldError, match="role: found draft; allowed: target"):
            GraphParamSets(target).of("draft")


def tensors_of(buffers: DecodeBuffers) -> dict[str, torch.Tensor]:
    fields = attrs.asdict(buffers, recurse=False)
    return {name: value for name, value in fields.items() if torch.is_tensor(value)}


def addresses(step: Any) -> set[int]:
    held = [step.positions, *(t for b in step.buffers.values() for t in tensors_of(b).values())]
    return {tensor.data_ptr() for tensor in held}


class TestBuffers:
    def buffers(self, query_len: int = 2) -> DecodeBuffers:
        return DecodeBuffers.allocate(
            CacheGroup(16, 4), 4 * query_len, query_len, torch.device("cpu")
        )

    def batch(self, query_len: int = 2) -> AttentionBatch:
        return decode_batch([(20, [5, 6]), (33, [7, 8, 9])], query_len)

    def test_contents_and_padding(self) -> None:
        buffers = self.buffers()
        buffers.block_table.fill_(77)  # what an earlier step left
        buffers.slot_mapping.fill_(77)
        buffers.refresh(self.batch())
        assert buffers.query_start_loc.tolist() == [0, 2, 4, 6, 8]
        assert buffers.host_query_ends() == [2, 4, 6, 8]
        assert buffers.seq_lens.tolist() == buffers.host_seq_lens() == [20, 33, 0, 0]
        table = [[5, 6, 0, 0], [7, 8, 9, 0], [0] * 4, [0] * 4]
        assert buffers.block_table.tolist() == table
        assert buffers.token_block_table.tolist() == [row for row in table for _ in range(2)]
        assert buffers.slot_mapping.tolist() == [98, 99, 143, 144, *[PAD_SLOT] * 4]
        assert buffers.token_context_lens.tolist() == [19, 20, 32, 33, 1, 1, 1, 1]

    def test_one_token_per_request_needs_no_second_table(self) -> None:
        buffers = self.buffers(1)
        assert buffers.token_block_table is buffers.block_table
        assert buffers.first(2).token_block_table is not buffers.block_table
        assert buffers.first(2).token_block_table.data_ptr() == buffers.block_table.data_ptr()

    def test_addresses_never_change_and_attributes_are_frozen(self) -> None:
        params = GraphParams("target", CaptureSizes([2, 4, 8], 2), {"": CacheGroup(16, 4)})
        held = {size: addresses(params.step(size)) for size in (2, 4, 8)}
        for keys in (20, 33, 7):
            batch = decode_batch([(keys, [1, 2, 3])], 2)
            params.prepare(batch, torch.tensor([keys - 2, keys - 1]))
            params.step(4).clear()
        assert {size: addresses(params.step(size)) for size in held} == held
        assert held[2] == held[8]  # one memory for all sizes
        step = params.step(2)
        for holder, names in (
            (step, ["positions"]),
            (step.buffers[""], tensors_of(self.buffers())),
        ):
            for name in names:
                with pytest.raises(attrs.exceptions.FrozenInstanceError):
                    setattr(holder, name, torch.zeros(1))

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            (decode_batch([(20, [5, 6])] * 5, 2), "num_reqs: found 5; allowed: at most 4"),
            (decode_batch([(20, [5, 6])], 1), "num_tokens: found 1 of 1 requests.*allowed: 2 per"),
            (
                AttentionBatch.from_lengths([1, 3], [5, 5], 16),
                "num_tokens: found 4 of 2.*longest 3",
            ),
            (AttentionBatch.from_lengths([2], [70], 16), "block_table: found 4 col.*at least 5"),
        ],
    )
    def test_what_does_not_fit_is_named_and_nothing_is_written(
        self, batch: AttentionBatch, message: str
    ) -> None:
        buffers = self.buffers()
        buffers.refresh(self.batch())
        before = {name: tensor.clone() for name, tensor in tensors_of(buffers).items()}
        with pytest.raises(AttentionBatchError, match=message):
            buffers.refresh(batch)
        for name, tensor in tensors_of(buffers).items():
            assert torch.equal(tensor, before[name])

    def test_device_lengths_are_enough(self) -> None:
        buffers, batch = self.buffers(), self.batch()
        buffers.refresh(attrs.evolve(batch, seq_lens_cpu=None, query_start_loc_cpu=None))
        assert buffers.host_seq_lens() == [20, 33, 0, 0]

    def test_positions_and_groups_must_fit(self) -> None:
        groups = {"full": CacheGroup(16, 4), "window": CacheGroup(16, 4)}
        params = GraphParams("target", CaptureSizes([4], 2), groups)
        batch = decode_batch([(20, [5, 6])], 2)
        with pytest.raises(InvalidFieldError, match=r"batches: found \['full'\].*'window'"):
            params.prepare({"full": batch}, torch.tensor([18, 19]))
        with pytest.raises(InvalidFieldError, match=r"batches: found \[\].*'full', 'window'"):
            params.prepare(batch, torch.tensor([18, 19]))
        both = {"full": batch, "window": batch}
        with pytest.raises(InvalidFieldError, match="positions: found 3 positions; allowed: the 2"):
            params.prepare(both, torch.tensor([18, 19, 20]))
        with pytest.raises(InvalidFieldError, match=r"source: found torch.int32 \[2\]"):
            params.prepare(both, torch.tensor([18, 19], dtype=torch.int32))


class TestSizes:
    @given(st.lists(st.integers(1, 200), min_size=1, unique=True), st.integers(0, 210))
    def test_padding_takes_the_smallest_size_that_fits(self, sizes: list[int], tokens: int) -> None:
        captured = CaptureSizes(sorted(sizes))
        fitting = [size for size in sizes if size >= tokens]
        if fitting:
            assert captured.padded(tokens) == min(fitting)
        else:
            with pytest.raises(InvalidFieldError, match=f"at most {max(sizes)}"):
                captured.padded(tokens)

    @pytest.mark.parametrize(
        ("sizes", "query_len", "message"),
        [
            ([], 1, r"sizes: found \[\]; allowed: at least one size, ascending"),
            ([4, 2], 1, r"sizes: found \[4, 2\]"),
            ([2, 2], 1, r"sizes: found \[2, 2\]"),
            ([0, 2], 1, r"sizes\[0\]: found 0"),
            ([4, 6], 4, r"sizes\[1\]: found 6; allowed: a multiple of the 4 tokens"),
            ([4], 0, "query_len: found 0"),
        ],
    )
    def test_wrong_sizes_are_named(self, sizes: list[int], query_len: int, message: str) -> None:
        with pytest.raises(InvalidFieldError, match=message):
            CaptureSizes(sizes, query_len)

    def test_steps_that_were_not_captured_are_named(self) -> None:
        params = GraphParams("draft", CaptureSizes([2, 4]), {"": CacheGroup(16, 4)}, num_steps=2)
        with pytest.raises(InvalidFieldError, match="size: found 3; allowed: 2 or 4"):
            params.step(3)
        with pytest.raises(InvalidFieldError, match="number: found 2; allowed: 0 to 1"):
            params.step(2, 2)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"role": "judge"}, "role: found judge; allowed: target or draft"),
            ({"groups": {}}, "groups: found none"),
            ({"num_steps": 2}, "num_steps: found 2; allowed: at least 1, and 1 for a target"),
        ],
    )
    def test_wrong_sets_are_named(self, arguments: dict[str, Any], message: str) -> None:
        given = {"role": "target", "sizes": CaptureSizes([1]), "groups": {"": CacheGroup(16, 1)}}
        with pytest.raises(InvalidFieldError, match=message):
            GraphParams(**given | arguments)


class TestWorkspace:
    def test_calls_share_the_largest_and_older_ones_stay_alive(self) -> None:
        """55 MB for the first layer must not serve a later one that needs 104 MB."""
        step = GraphParams("target", CaptureSizes([1]), {"": CacheGroup(16, 1)}).step(1)
        small = step.workspace(55)
        large = step.workspace(104)
        assert (small.numel(), large.numel()) == (55, 104)
        assert step.workspace(40).data_ptr() == small.data_ptr()
        assert step.workspace(90).data_ptr() == large.data_ptr()
        assert small.dtype == torch.uint8


class TestRecords:
    def test_a_layer_is_recorded_once(self) -> None:
        captured, _ = pair([2], 1)
        step = captured.params.step(2)
        assert [param.layer for param in step.params] == [kind.name for kind in KINDS]
        graph = HostGraph()
        with graph.capturing(), pytest.raises(InvalidFieldError, match=r"layer: found layers\.0"):
            step.record(step.params[0], graph)

    def test_windows_are_no_matter_of_paged_attention(self) -> None:
        with pytest.raises(InvalidFieldError, match="sliding_window: found 9"):
            Captured(Model([LayerKind("a", "full", "paged", window=9)]), CaptureSizes([1]))

    def test_rows_must_be_those_of_the_step(self) -> None:
        captured, _ = pair([2], 1)
        param = captured.params.step(2).params[0]
        assert isinstance(param, PagedAttentionGraphParam)
        with pytest.raises(InvalidFieldError, match="query: found 1 rows; allowed: 2"):
            attrs.evolve(param, query=param.query[:1])

    def test_records_are_frozen(self) -> None:
        captured, _ = pair([2], 1)
        for param in captured.params.step(2).params:
            with pytest.raises(attrs.exceptions.FrozenInstanceError):
                param.out = torch.zeros(2)  # type: ignore[misc]


class TestHostGraph:
    def test_replays_on_the_same_memory(self) -> None:
        graph, given_in = HostGraph(), torch.tensor([1.0, 2.0])
        with graph.capturing():
            doubled = given_in * 2
            view = doubled[1:]
            view.add_(10)
            total = doubled.sum()
        assert total.item() == 16
        given_in.copy_(torch.tensor([5.0, 7.0]))
        graph.replay()
        assert doubled.tolist() == [10, 24]
        assert view.tolist() == [24]
        assert total.item() == 34

    def test_numbers_are_baked_in_unless_their_task_is_renewed(self) -> None:
        graph, out, factor = HostGraph(), torch.zeros(1), [2]

        def launch() -> None:
            out.fill_(factor[0])

        with graph.capturing():
            handle = graph.capture(launch)
        factor[0] = 3
        graph.replay()
        assert out.item() == 2
        graph.update(handle, launch)
        graph.replay()
        assert out.item() == 3

    def test_a_task_is_replayed_in_its_place(self) -> None:
        graph, x = HostGraph(), torch.ones(1)
        with graph.capturing():
            y = x + 1
            handle = graph.capture(lambda: y.mul_(3))
            z = y + 1
        graph.update(handle, lambda: y.mul_(5))
        graph.replay()
        assert z.item() == 11

    def test_misuse_is_named(self) -> None:
        graph = HostGraph()
        with pytest.raises(InvalidFieldError, match="graph: found no open capture"):
            graph.capture(lambda: None)
        with graph.capturing():
            pass
        with pytest.raises(InvalidFieldError, match="a captured graph"), graph.capturing():
            pass
        with pytest.raises(InvalidFieldError, match="handle: found int"):
            graph.update(3, lambda: None)


def test_copies_never_convert() -> None:
    target = torch.zeros(2, dtype=torch.int32)
    copy_into(target, torch.tensor([1, 2], dtype=torch.int32))
    assert target.tolist() == [1, 2]
    for source in (torch.tensor([1, 2]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(InvalidFieldError, match=r"source: found .*allowed: torch.int32 \[2\]"):
            copy_into(target, source)


class TestControls:
    """Each deliberate fault makes a replay differ from the eager step."""

    STEP: Step = ([(20, [1, 2]), (9, [3])], [(30, [11, 12]), (20, [13, 14])])

    def differs(self, captured: Captured, eager: Model) -> None:
        compare(*pair([4], 2), self.STEP, 2, 0)  # the same step is right without the fault
        with pytest.raises(AssertionError):
            compare(captured, eager, self.STEP, 2, 0)

    @pytest.mark.parametrize("layer", ["layers.1", "layers.2"])
    def test_host_lengths_that_are_not_renewed(self, layer: str) -> None:
        captured, eager = pair([4], 2, skip={layer})
        self.differs(captured, eager)

    @pytest.mark.parametrize("name", ["slot_mapping", "positions", "block_table"])
    def test_a_buffer_that_is_replaced(self, name: str) -> None:
        """What freezing prevents: the refresh goes to memory that no graph reads."""
        captured, eager = pair([4], 2, skip={kind.name for kind in KINDS})
        step = captured.params.step(4)
        holder = step if name == "positions" else step.buffers["full"]
        object.__setattr__(holder, name, getattr(holder, name).clone())
        self.differs(captured, eager)

    def test_a_replay_that_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        captured, eager = pair([4], 2)
        monkeypatch.setattr(HostGraph, "replay", lambda graph: None)
        with pytest.raises(AssertionError):
            compare(captured, eager, self.STEP, 2, 0)

    def test_padding_that_keeps_its_slots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DecodeBuffers, "_pad", lambda buffers, rows, columns: None)
        captured, eager = pair([4, 8], 2)
        full: Step = ([(n, [n % 8 + 1, n % 8 + 9]) for n in (20, 21, 22, 23)],) * 2
        compare(captured, eager, full, 2, 0)
        three: Step = (full[0][:3], full[1][:3])
        with pytest.raises(AssertionError):
            compare(captured, eager, three, 2, 1)


def test_infinite_padding_reaches_no_real_row() -> None:
    """Padding tokens compute on whatever they find; real rows do not see it."""
    captured, eager = pair([4, 8], 2)
    step: Step = ([(20, [1, 2])], [(20, [11, 12])])
    captured.model.layers[0].caches[0][0].fill_(math.inf)
    hidden, positions = torch.randn(2, WIDTH), positions_of(step[0], 2)
    found = captured.replay(hidden, positions, batches_of(step, 2))
    expected = eager.eager(hidden, positions, batches_of(step, 2))
    torch.testing.assert_close(found[:2], expected, **TOLERANCE)

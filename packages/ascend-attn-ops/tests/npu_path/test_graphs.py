"""Graphs: a decode step captured once and replayed with other lengths, tables and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ascend_attn_ops as ops
from ascend_attn_ops.emulator import Emulator

BF, INT = torch.bfloat16, torch.int32
BLOCK, HEADS = 16, 8


class DecodeStep:
    """Writes one latent row for each of two requests and attends to the paged cache.

    Everything that changes from step to step is a device tensor of fixed address.
    """

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to(BF).npu()

        self.latent, self.rope = normal(2, 1, 512), normal(2, 1, 64)
        self.query, self.query_rope = normal(2, HEADS, 512), normal(2, HEADS, 64)
        self.cache, self.rope_cache = normal(6, BLOCK, 1, 512), normal(6, BLOCK, 1, 64)
        self.indices = torch.arange(24, dtype=INT).repeat(2, 1).view(2, 1, 24).npu()
        self.table = torch.tensor([[0, 1], [2, 3]], dtype=INT).npu()
        self.ends = torch.tensor([1, 2], dtype=INT).npu()
        self.lengths = torch.tensor([20, 9], dtype=INT).npu()
        self.slots = torch.tensor([19, 2 * BLOCK + 8], dtype=INT).npu()

    def run(self) -> torch.Tensor:
        ops.scatter_pa_kv_cache(
            self.latent, self.rope, self.cache, self.rope_cache, self.slots, cache_mode="Norm"
        )
        out, _, _ = ops.sparse_flash_attention(
            self.query,
            self.cache,
            self.cache,
            self.indices,
            0.0417,
            query_rope=self.query_rope,
            key_rope=self.rope_cache,
            layout_query="TND",
            layout_kv="PA_BSND",
            actual_seq_lengths_query=self.ends,
            actual_seq_lengths_kv=self.lengths,
            block_table=self.table,
            attention_mode=2,
        )
        return out

    def move_on(self) -> None:
        """The next step: longer, in other blocks."""
        self.table.copy_(torch.tensor([[4, 1], [2, 5]], dtype=INT))
        self.lengths.copy_(torch.tensor([21, 17], dtype=INT))
        self.slots.copy_(torch.tensor([BLOCK + 4, 5 * BLOCK], dtype=INT))
        self.latent.mul_(-0.5)

    def state(self) -> list[torch.Tensor]:
        return [self.cache.cpu(), self.rope_cache.cpu()]


def captured(step: Any) -> tuple[Any, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = step()
    return graph, out


def test_replay_of_a_decode_step_equals_the_eager_step(npu: Emulator) -> None:
    eager, replayed = DecodeStep(), DecodeStep()
    before = replayed.state()
    graph, out = captured(replayed.run)
    assert all(map(torch.equal, replayed.state(), before))  # capturing computes nothing
    results = []
    for _ in range(2):
        with npu.record() as seen:
            graph.replay()
            torch.npu.synchronize()
        assert seen.operators == []  # no operator is prepared again
        assert (seen.counters.graph_replays, seen.counters.replayed_tasks) == (1, 2)
        wanted = eager.run().cpu()
        assert torch.equal(out.cpu(), wanted)
        assert all(map(torch.equal, replayed.state(), eager.state()))
        results.append(wanted)
        eager.move_on()
        replayed.move_on()
    assert not torch.equal(*results)  # the second step has another answer


def test_host_lengths_in_a_graph_are_updated_as_a_task_group(npu: Emulator) -> None:
    """fused_infer_attention_score takes its lengths from the host: a replay alone keeps them."""
    g = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 128, generator=g).to(BF).npu()
    cache = torch.randn(6, BLOCK, 2 * 128, generator=g).to(BF).npu()
    table = torch.tensor([[0, 1], [2, 3]], dtype=INT).npu()
    out = torch.zeros(2, 4, 128, dtype=BF).npu()
    lse = torch.empty(0, dtype=torch.float32).npu()

    def attend(lengths: list[int], target: list[torch.Tensor]) -> None:
        ops.fused_infer_attention_score(
            query, cache, cache, num_heads=4, num_key_value_heads=2, scale=0.088,
            input_layout="TND", actual_seq_lengths=[1, 2], actual_seq_lengths_kv=lengths,
            block_table=table, block_size=BLOCK, out=target,
        )  # fmt: skip

    def answer(lengths: list[int]) -> torch.Tensor:
        fresh = torch.zeros_like(out)
        attend(lengths, [fresh, lse])
        return fresh.cpu()

    stream = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=stream):
        torch.npu.graph_task_group_begin(stream)
        attend([20, 9], [out, lse])
        group = torch.npu.graph_task_group_end(stream)
    graph.replay()
    assert torch.equal(out.cpu(), answer([20, 9]))
    with torch.npu.stream(stream):
        torch.npu.graph_task_update_begin(stream, group)
        attend([31, 17], [out, lse])
        torch.npu.graph_task_update_end(stream)
    graph.replay()
    assert torch.equal(out.cpu(), answer([31, 17]))
    assert not torch.equal(answer([31, 17]), answer([20, 9]))


def test_synchronising_while_capturing_is_refused(npu: Emulator) -> None:
    x = torch.ones(4, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 2
        with pytest.raises(RuntimeError, match="107027"):
            torch.npu.current_stream().synchronize()
    graph.replay()
    assert y.cpu().tolist() == [2.0] * 4


def test_a_second_stream_joins_the_capture_through_an_event(npu: Emulator) -> None:
    x = torch.ones(4, device="npu")
    side = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        torch.npu.current_stream().wait_stream(side)
        z = y * 3
    x.fill_(4.0)
    graph.replay()
    assert z.cpu().tolist() == [15.0] * 4


def test_a_graph_gives_its_prepared_calls_back(npu: Emulator) -> None:
    x = torch.ones(4, device="npu")
    before = npu.prepared_calls
    graph, y = captured(lambda: x * 2 + 1)
    assert npu.prepared_calls == before + 2
    del graph, y
    torch.npu.synchronize()
    assert npu.prepared_calls == before

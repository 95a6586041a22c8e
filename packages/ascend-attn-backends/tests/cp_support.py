"""Ranks that share keys, heads and tokens: one step of each backend on one rank.

The functions ``..._rank`` say what a rank does; they run on threads (:func:`on_ranks`) and on gloo
processes (``cp_processes``) alike. Each returns the rank's heads of all tokens in the order of the
step, whatever tokens the rank computed itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch
from attn_backends_support import UNWRITTEN, Scenario
from hypothesis import strategies as st
from latent_support import SCALE, LatentScenario
from sparse_oracle import ROWS, SparseStep

from ascend_attn_backends import (
    AscendAttentionDCPImpl,
    AscendAttentionDCPMetadataBuilder,
    AscendMlaDCPImpl,
    AscendMlaDCPMetadataBuilder,
    AscendMlaPCPImpl,
    AscendMlaPCPMetadataBuilder,
    AscendSFADCPImpl,
    AscendSFADCPMetadataBuilder,
    AscendSFAIndexerDCPImpl,
    AscendSFAIndexerDCPMetadataBuilder,
    AscendSFAIndexerPCPImpl,
    AscendSFAIndexerPCPMetadataBuilder,
    AscendSFAPCPImpl,
    AscendSFAPCPMetadataBuilder,
    AttentionBatch,
    ContextShard,
    DCPGroup,
    KeyValueRankStep,
    LatentRankStep,
    PagedCacheShape,
    PrefillShard,
    ThreadDCPGroup,
    run_ranks,
    sharded_batch,
)

T = TypeVar("T")
DRAFTS = 3
BLOCK = 16

# (query_lens, seq_lens, is_prefilling) of a step: fewer keys than ranks, decode, a chunk of a
# prompt with cached context and a whole prompt, verification of 3 drafts, all of it together.
STEPS: dict[str, tuple[list[int], list[int], list[bool]]] = {
    "short": ([1, 2, 1], [1, 2, 3], [True, True, False]),
    "decode": ([1, 1], [2, 9], [False, False]),
    "chunk": ([11, 5], [40, 5], [True, True]),
    "verify 3": ([4, 4], [4, 33], [False, False]),
    "mixed": ([4, 1, 3, 0, 17], [21, 9, 3, 6, 17], [False, False, True, False, True]),
}


@attrs.frozen(kw_only=True)
class Layout:
    """How ranks share a step.

    Attributes:
        tokens: Ranks that share the tokens of prefills (P).
        heads: Ranks with the same tokens that share heads and keys (D).
        shares_keys: Whether the ranks that share tokens share the keys too.
        interleave: Keys in a row that a rank keeps.
        read_interleave: The same as a negative control lets the metadata believe it.
    """

    tokens: int = 1
    heads: int = 1
    shares_keys: bool = True
    interleave: int = 1
    read_interleave: int | None = None

    @property
    def size(self) -> int:
        return self.tokens * self.heads

    @property
    def spreads_tokens(self) -> bool:
        return self.tokens > 1

    def shard(self, rank: int, interleave: int | None = None) -> ContextShard:
        """The keys of a rank."""
        whole = self.shares_keys
        return ContextShard(
            rank=rank if whole else rank % self.heads,
            size=self.size if whole else self.heads,
            interleave=interleave or self.interleave,
        )

    def read_shard(self, rank: int) -> ContextShard:
        return self.shard(rank, self.read_interleave)

    def shares(self, rank: int) -> dict[str, Any]:
        """What the builders are told, apart from the block size."""
        if not self.spreads_tokens:
            return {"shard": self.read_shard(rank)}
        return {
            "shard": self.read_shard(rank),
            "prefill": PrefillShard(rank=rank // self.heads, size=self.tokens),
            "shares_keys": self.shares_keys,
            "num_spec_tokens": DRAFTS,
        }


SHARED_KEYS = [Layout(heads=size) for size in (1, 2, 4)]
SPREAD = [
    Layout(tokens=2),
    Layout(tokens=4),
    Layout(tokens=2, heads=2),
    Layout(tokens=2, shares_keys=False),
    Layout(tokens=4, shares_keys=False),
    Layout(tokens=2, heads=2, shares_keys=False),
]


def layouts(of: Sequence[Layout]) -> st.SearchStrategy[Layout]:
    """These layouts with any interleave."""
    interleaves = st.sampled_from([1, 1, 2, 3, 16, 20])
    pairs = st.tuples(st.sampled_from(of), interleaves)
    return pairs.map(lambda pair: attrs.evolve(pair[0], interleave=pair[1]))


@st.composite
def kinds(draw: st.DrawFn, lengths: Sequence[int]) -> list[bool]:
    """``is_prefilling`` of requests with these numbers of tokens."""
    count = len(lengths)
    return draw(st.lists(st.booleans(), min_size=count, max_size=count))


@attrs.frozen
class Ranks:
    """One rank and its groups."""

    rank: int
    tokens: DCPGroup
    heads: DCPGroup


def thread_ranks(world: ThreadDCPGroup, layout: Layout) -> Ranks:
    token_rank, head_rank = divmod(world.rank, layout.heads)
    heads = [token_rank * layout.heads + other for other in range(layout.heads)]
    tokens = [other * layout.heads + head_rank for other in range(layout.tokens)]
    return Ranks(world.rank, world.subgroup(tokens), world.subgroup(heads))


def on_ranks(layout: Layout, body: Callable[[Ranks], T]) -> list[T]:
    """What each rank returns, as threads."""

    @torch.no_grad()
    def run(world: ThreadDCPGroup) -> T:
        return body(thread_ranks(world, layout))

    return run_ranks(layout.size, run)


def joined(outputs: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """All heads side by side; every set of ranks with all heads must agree."""
    sets = [
        torch.cat(list(outputs[first : first + layout.heads]), 1)
        for first in range(0, layout.size, layout.heads)
    ]
    for other in sets[1:]:
        torch.testing.assert_close(other, sets[0])
    return sets[0]


def batch_of(step: Any, shard: ContextShard, prefilling: Sequence[bool] | None) -> AttentionBatch:
    """The batch of a rank for a scenario with ``query_lens`` and ``seq_lens``."""
    return sharded_batch(
        step.query_lens,
        step.seq_lens,
        BLOCK,
        shard,
        causal=step.causal,
        is_prefilling=prefilling or None,
    )


def batches(query_lens: list[int], seq_lens: list[int], size: int) -> list[AttentionBatch]:
    """The batch of each of ``size`` ranks that share keys."""
    return [
        sharded_batch(query_lens, seq_lens, BLOCK, ContextShard(rank=rank, size=size))
        for rank in range(size)
    ]


def cached_slots(step: Any, shard: ContextShard) -> torch.Tensor:
    """Slots on a rank of every row of every request, -1 for those that this step writes."""
    slots = sharded_batch(step.seq_lens, step.seq_lens, BLOCK, shard).slot_mapping
    end = 0
    for length, new in zip(step.seq_lens, step.query_lens, strict=True):
        end += length
        slots[end - new : end] = -1
    return slots


def num_blocks(step: Any, shard: ContextShard) -> int:
    return int(sharded_batch(step.seq_lens, step.seq_lens, BLOCK, shard).block_table.max()) + 2


def own_heads(heads: int, layout: Layout, rank: int) -> slice:
    count = heads // layout.heads
    return slice(rank % layout.heads * count, (rank % layout.heads + 1) * count)


def with_tail(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The rows, and rows of NaN behind them: whoever reads padding is found out."""
    return torch.cat([rows, rows.new_full((count, *rows.shape[1:]), math.nan)])


def standard_rank(step: Scenario, layout: Layout, ranks: Ranks, padding: int = 0) -> torch.Tensor:
    """Grouped-query attention; ``padding`` adds rows and tokens."""
    shard = layout.shard(ranks.rank)
    impl = AscendAttentionDCPImpl(
        step.heads // layout.heads, step.head_size, step.scale, step.kv_heads, ranks.heads
    )
    shape = PagedCacheShape(num_blocks(step, shard), step.kv_heads, BLOCK, step.head_size)
    caches = [shape.allocate(step.dtype).fill_(UNWRITTEN) for _ in range(2)]
    impl.write_kv(torch.cat(step.keys), torch.cat(step.values), *caches, cached_slots(step, shard))
    batch = batch_of(step, shard, None)
    batch = batch.padded(batch.num_rows + padding, batch.num_token_rows + padding)
    metadata = AscendAttentionDCPMetadataBuilder(BLOCK, **layout.shares(ranks.rank)).build(batch)
    new = [with_tail(step.new_tokens(rows), padding) for rows in (step.keys, step.values)]
    impl.write_kv(*new, *caches, metadata.slot_mapping)
    query = with_tail(step.query[:, own_heads(step.heads, layout, ranks.rank)], padding)
    brought = KeyValueRankStep(
        query=query,
        key=new[0],
        value=new[1],
        key_cache=caches[0],
        value_cache=caches[1],
        metadata=metadata,
    )
    output = torch.full_like(query, math.nan)
    assert impl.forward(brought, output) is output
    return output


def latent_rank(
    step: LatentScenario, prefilling: list[bool], layout: Layout, ranks: Ranks
) -> torch.Tensor:
    """Dense latent attention, with tokens spread where the layout says so."""
    shard, shares = layout.shard(ranks.rank), layout.shares(ranks.rank)
    batch = batch_of(step, shard, prefilling)
    caches = step.caches(num_blocks(step, shard))
    heads = step.heads // layout.heads
    whole = [torch.cat(rows) for rows in (step.latents, step.ropes)]
    columns = own_heads(step.heads, layout, ranks.rank)
    rows = [step.q_nope[:, columns], step.q_pe[:, columns]]
    rows += [step.new_rows(step.latents), step.new_rows(step.ropes)]
    if not layout.spreads_tokens:
        impl = AscendMlaDCPImpl(heads, SCALE, ranks.heads)
        metadata = AscendMlaDCPMetadataBuilder(BLOCK, **shares).build(batch)
        impl.write_kv(*whole, *caches, cached_slots(step, shard))
        impl.write_kv(rows[2], rows[3], *caches, metadata.slot_mapping)
        return _latent_forward(impl, rows, caches, metadata)
    spread = AscendMlaPCPImpl(heads, SCALE, ranks.tokens, ranks.heads)
    metadata = AscendMlaPCPMetadataBuilder(BLOCK, **shares).build(batch)
    spread.write_kv(*whole, *caches, cached_slots(step, shard))
    rows = [with_tail(metadata.pcp.own_rows(part), 2) for part in rows]
    spread.gather_and_write_kv(rows[2], rows[3], *caches, metadata)
    output = _latent_forward(spread, rows, caches, metadata)
    assert torch.equal(output[metadata.num_own_tokens :], torch.zeros_like(output[-2:]))
    return metadata.pcp.step_order(spread.gather_tokens((output,), metadata.pcp)[0])


def _latent_forward(
    impl: AscendMlaDCPImpl, rows: list[torch.Tensor], caches: list[torch.Tensor], metadata: Any
) -> torch.Tensor:
    names = ("q_nope", "q_pe", "latent", "rope")
    brought = LatentRankStep(
        **dict(zip(names, rows, strict=True)),
        latent_cache=caches[0],
        rope_cache=caches[1],
        metadata=metadata,
    )
    output = torch.full_like(rows[0], math.nan)
    assert impl.forward_mqa(brought, output) is output
    return output


def sparse_caches(step: SparseStep, shard: ContextShard) -> dict[str, torch.Tensor]:
    """Caches of a rank with the rows of earlier steps; other rows are NaN."""
    count, slots = num_blocks(step, shard), cached_slots(step, shard)
    caches = {
        name: torch.full((count, 1, BLOCK, size), math.nan, dtype=step.dtype)
        for name, size in ROWS.items()
    }
    rows = {name: torch.cat(history) for name, history in step.history.items()}
    step.impl().write_kv(rows["latent"], rows["rope"], caches["latent"], caches["rope"], slots)
    step.indexer().write_kv(rows["index"], caches["index"], slots)
    return caches


def sparse_rank(
    step: SparseStep, prefilling: list[bool], layout: Layout, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    """(choice, output) of sparse latent attention, with tokens spread where the layout says so."""
    shard, shares = layout.shard(ranks.rank), layout.shares(ranks.rank)
    batch, caches = batch_of(step, shard, prefilling), sparse_caches(step, shard)
    heads, columns = step.heads // layout.heads, own_heads(step.heads, layout, ranks.rank)
    rows = {name: step.new_rows(name) for name in ROWS}
    rows |= {"query": step.query[0][:, columns], "query_rope": step.query[1][:, columns]}
    rows |= {"index_query": step.index_query, "weights": step.weights}
    if not layout.spreads_tokens:
        impl = AscendSFADCPImpl(heads, step.scale, ranks.heads)
        indexer = AscendSFAIndexerDCPImpl(step.index_heads, step.top_k, ranks.heads)
        metadata = AscendSFADCPMetadataBuilder(BLOCK, **shares).build(batch)
        index_metadata = AscendSFAIndexerDCPMetadataBuilder(BLOCK, **shares).build(batch)
        slots = metadata.slot_mapping
        impl.write_kv(rows["latent"], rows["rope"], caches["latent"], caches["rope"], slots)
        indexer.write_kv(rows["index"], caches["index"], index_metadata.slot_mapping)
        return _sparse_forward(impl, indexer, rows, caches, (metadata, index_metadata))
    spread = AscendSFAPCPImpl(heads, step.scale, ranks.tokens, ranks.heads)
    chooser = AscendSFAIndexerPCPImpl(step.index_heads, step.top_k, ranks.tokens, ranks.heads)
    metadata = AscendSFAPCPMetadataBuilder(BLOCK, **shares).build(batch)
    index_metadata = AscendSFAIndexerPCPMetadataBuilder(BLOCK, **shares).build(batch)
    rows = {name: metadata.pcp.own_rows(part) for name, part in rows.items()}
    written = (rows["latent"], rows["rope"], caches["latent"], caches["rope"])
    spread.gather_and_write_kv(*written, metadata)
    chooser.gather_and_write_kv(rows["index"], caches["index"], index_metadata)
    found = _sparse_forward(spread, chooser, rows, caches, (metadata, index_metadata))
    pcp = metadata.pcp
    choice, output = (pcp.step_order(spread.gather_tokens((part,), pcp)[0]) for part in found)
    return choice, output


def _sparse_forward(
    impl: AscendSFADCPImpl,
    indexer: AscendSFAIndexerDCPImpl,
    rows: dict[str, torch.Tensor],
    caches: dict[str, torch.Tensor],
    metadata: tuple[Any, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = indexer.forward(rows["index_query"], rows["weights"], caches["index"], metadata[1])
    output = torch.full_like(rows["query"], math.nan)
    arguments = (rows["query"], rows["query_rope"], caches["latent"], caches["rope"], chosen)
    assert impl.forward(*arguments, metadata[0], output) is output
    return chosen, output


def compare_sparse(
    step: SparseStep, choice: torch.Tensor, output: torch.Tensor, tolerance: dict[str, float]
) -> None:
    """Raises AssertionError when choice or output differ from the float64 oracle."""
    for token in range(sum(step.query_lens)):
        best = step.best(token)
        found = choice[token, 0].tolist()
        assert sorted(found[: len(best)]) == sorted(best)
        assert set(found[len(best) :]) <= {-1}
        expected, _ = step.attention(token, best)
        torch.testing.assert_close(output[token].double(), expected, **tolerance)


class ChangedGroup:
    """A group whose results a negative control changes on the way.

    Args:
        group: The real one.
        change: (rank that sent, tensor that arrived) -> what this rank sees of it.
    """

    def __init__(
        self, group: DCPGroup, change: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> None:
        self._group, self._change = group, change
        self.rank, self.size = group.rank, group.size

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._group.all_gather(tensor)

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrived = self._group.all_to_all(tensors)
        if not arrived[0].is_floating_point():  # candidates of an indexer
            return arrived
        return [self._change(rank, tensor) for rank, tensor in enumerate(arrived)]


def lost_shard(rank: int, rows: torch.Tensor) -> torch.Tensor:
    """Partial results of rank 1 arrive as if it had no keys."""
    if rank != 1:
        return rows
    lost = torch.zeros_like(rows)
    lost[..., -1] = -math.inf
    return lost


def finite_lse(rank: int, rows: torch.Tensor) -> torch.Tensor:
    """A shard without keys has lse 0 in place of -inf."""
    return torch.where(rows.isneginf(), 0.0, rows)

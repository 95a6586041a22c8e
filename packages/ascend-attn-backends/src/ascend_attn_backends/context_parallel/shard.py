"""Which keys of a request live on which rank, and how many."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..batch import AttentionBatch, consecutive_blocks
from ..errors import InvalidFieldError
from ..kv_layout import PAD_SLOT, slots_for_positions
from ..transfer import copy_to_device


@attrs.frozen(kw_only=True)
class ContextShard:
    """One rank's share of the keys of every request.

    Position p lives on rank ``(p // interleave) % size`` (vLLM's cp_kv_cache_interleave_size). On
    its rank it is local position ``p // (interleave * size) * interleave + p % interleave``, so the
    keys of a rank fill its blocks without gaps. Counts are never negative.

    Attributes:
        rank: This rank, from 0.
        size: Ranks W that share the keys.
        interleave: Positions in a row that one rank keeps, at least 1.

    Raises:
        InvalidFieldError: A size is below 1, or the rank is not below the size.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def __attrs_post_init__(self) -> None:
        check_rank(self.rank, self.size)
        if self.interleave < 1:
            raise InvalidFieldError("interleave", self.interleave, "at least 1")

    def local_counts(self, lengths: torch.Tensor) -> torch.Tensor:
        """Keys on this rank among the first ``lengths`` positions of each request.

        The keys that a query at position p sees are those of length p + 1, its own included.

        Args:
            lengths: Any integer dtype and shape; negative lengths count as 0.

        Returns:
            Like ``lengths``, at least 0.
        """
        return self.counts_on_all_ranks(lengths)[..., self.rank]

    def counts_on_all_ranks(self, lengths: torch.Tensor) -> torch.Tensor:
        """:meth:`local_counts` of every rank: ``[..., size]``; the sum is the length."""
        cycle = self.size * self.interleave
        lengths = lengths.clamp(min=0)[..., None]
        first = torch.arange(self.size, device=lengths.device) * self.interleave
        rest = (lengths % cycle - first).clamp(min=0, max=self.interleave)
        return (lengths // cycle * self.interleave + rest).to(lengths.dtype)

    def owns(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether each position lives on this rank: bool, shape of ``positions``."""
        return positions // self.interleave % self.size == self.rank

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Place of each position among the keys of the rank that owns it."""
        cycle = self.size * self.interleave
        return positions // cycle * self.interleave + positions % self.interleave

    def global_positions(self, local: torch.Tensor) -> torch.Tensor:
        """Position in the request of each place among the keys of this rank; the inverse."""
        cycle = self.size * self.interleave
        run = torch.div(local, self.interleave, rounding_mode="floor")
        return run * cycle + self.rank * self.interleave + local % self.interleave

    def local_slots(
        self,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        """Cache slot of each token on this rank, negative for the tokens of other ranks.

        Args:
            block_table: ``[num_rows, max_blocks]`` int32 in host memory, blocks of local keys.
            rows: ``[num_tokens]`` int64, the request row of each token.
            positions: ``[num_tokens]`` int64, position of each token in its request.
            block_size: Tokens per block.

        Returns:
            ``[num_tokens]`` int64: one slot for every token, drafts included.

        Raises:
            InvalidFieldError: A local position lies past the end of its block row.
        """
        slots = torch.full(positions.shape, PAD_SLOT, dtype=torch.int64)
        own = self.owns(positions)
        local = self.local_positions(positions[own])
        slots[own] = slots_for_positions(block_table, rows[own], local, block_size)
        return slots


def check_rank(rank: int, size: int) -> None:
    """Check a rank of a group.

    Raises:
        InvalidFieldError: The size is below 1, or the rank is not below it.
    """
    if size < 1:
        raise InvalidFieldError("size", size, "at least 1")
    if not 0 <= rank < size:
        raise InvalidFieldError("rank", rank, f"0 to {size - 1}")


def sharded_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    shard: ContextShard,
    *,
    block_table: torch.Tensor | None = None,
    causal: bool | Sequence[bool] = True,
    is_prefilling: Sequence[bool] | None = None,
    device: torch.device | str = "cpu",
) -> AttentionBatch:
    """The batch that one rank sees: all tokens and lengths, its own blocks and slots.

    Args:
        query_lens: Tokens of each request in this step; every rank computes all of them.
        seq_lens: Keys of each request on all ranks together.
        block_size: Tokens per block.
        shard: The rank.
        block_table: ``[num_reqs, max_blocks]`` int32 in host memory: blocks of the rank's own keys.
            None gives each request the next blocks, the same ones on every rank.
        causal: One value, or one per request.
        is_prefilling: One flag per request.
        device: Where the tensors live.

    Raises:
        AttentionBatchError: See :meth:`AttentionBatch.from_lengths`.
        InvalidFieldError: A row of the block table is too narrow for the tokens to be written.
    """
    plain = AttentionBatch.from_lengths(
        query_lens,
        seq_lens,
        block_size,
        causal=causal,
        is_prefilling=is_prefilling,
        device=device,
    )
    keys, lens = torch.tensor(list(seq_lens)), torch.tensor(list(query_lens))
    if block_table is None:  # rank 0 never has fewer keys than another one
        largest = attrs.evolve(shard, rank=0).local_counts(keys)
        block_table = consecutive_blocks(largest.tolist(), block_size)
    rows = torch.repeat_interleave(torch.arange(len(lens)), lens)
    starts = plain.host_query_starts()[rows]
    positions = torch.arange(len(rows)) - starts + (keys - lens)[rows]
    slots = shard.local_slots(block_table, rows, positions, block_size)
    return attrs.evolve(
        plain,
        block_table=copy_to_device(block_table, device),
        slot_mapping=copy_to_device(slots, device),
    )

"""What every backend shares when the keys of a request are spread over ranks.

A rank keeps the keys that :class:`ContextShard` gives it and a share of the query heads. A step
gathers the heads of all ranks, attends with all heads over the rank's own keys, exchanges the
partial results so that each rank gets its own heads back, and merges them by their lse.

The causal mask of the operators is aligned to a request's last key, which says nothing about a
shard: query i of several does not see the first keys of a shard up to a fixed distance. Two ways
around that are in use. Where lengths are host integers, a step in which a causal request has
several tokens is split: the cached keys before this step are seen by every query and need no mask;
the keys of this step are at hand on every rank and need the usual causal mask (source of the split:
vllm-ascend, attention/context_parallel). Where lengths are device tensors, each token becomes a
request of its own (:func:`per_token_batch`).

What the ranks do depends on facts that they share (token counts, host lengths), never on what one
of them holds: a rank without keys takes part in every exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch

from ascend_attn_ops import PartialAttention, merge_partials

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..standard.builder import covered_starts, host_key_counts
from .group import DCPGroup
from .shard import ContextShard

Tensors = tuple[torch.Tensor, ...]

Attend = Callable[[Tensors], PartialAttention]
"""Attention of some queries ``[T, heads, size]`` over the keys of this rank."""


@attrs.frozen(kw_only=True)
class AscendDCPMetadata:
    """What decode context parallelism adds to the metadata of a step.

    Attributes:
        shard: This rank's share.
        exchanges: Whether the ranks exchange results; the same on every rank, so that none waits.
    """

    shard: ContextShard
    exchanges: bool


@attrs.frozen(kw_only=True)
class AscendDCPLengths(AscendDCPMetadata):
    """The same, with the lengths of all ranks as host integers.

    Attributes:
        splits_current: Whether this step's keys are attended to apart from the cached ones.
        cached_lens: ``[num_reqs]`` keys that are read from the caches of all ranks together: those
            before this step, or all where the step is not split. 0 for requests without tokens.
        num_computed_tokens_of_dcp: ``[num_reqs][size]`` the same, on each rank.
    """

    splits_current: bool
    cached_lens: tuple[int, ...]
    num_computed_tokens_of_dcp: tuple[tuple[int, ...], ...]

    @property
    def local_cached_lens(self) -> tuple[int, ...]:
        """``[num_reqs]`` keys that are read from this rank's cache."""
        return tuple(counts[self.shard.rank] for counts in self.num_computed_tokens_of_dcp)


@attrs.frozen(slots=False)
class DCPMetadataBuilderMixin:
    """Builds :class:`AscendDCPMetadata`; mixed into the builder of a backend.

    Attributes:
        shard: This rank's share of the keys.
    """

    shard: ContextShard = attrs.field(kw_only=True, default=ContextShard())

    def dcp_metadata(self, batch: AttentionBatch) -> AscendDCPMetadata:
        """For backends whose lengths are device tensors; no tensor is read."""
        exchanges = self.shard.size > 1 and batch.num_reqs > 0 and batch.num_tokens > 0
        return AscendDCPMetadata(shard=self.shard, exchanges=exchanges)

    def dcp_lengths(self, batch: AttentionBatch) -> AscendDCPLengths:
        """Lengths of every rank, from the batch's host copies.

        ``batch.seq_lens`` counts the keys of all ranks; block table and slots are this rank's own.
        Requests may have different numbers of tokens. Rows without keys keep length 0, also where
        a padding row owns tokens.
        """
        starts = torch.tensor(covered_starts(batch))
        keys, lens = torch.tensor(host_key_counts(batch), dtype=torch.int64), starts.diff()
        split = self.shard.size > 1 and _has_causal_row(batch, lens > 1)
        cached = ((keys - lens).clamp(min=0) if split else keys) * (lens > 0)
        counts = self.shard.counts_on_all_ranks(cached)
        return AscendDCPLengths(
            shard=self.shard,
            exchanges=self.shard.size > 1 and bool(cached.any()),
            splits_current=split,
            cached_lens=tuple(cached.tolist()),
            num_computed_tokens_of_dcp=tuple(tuple(row) for row in counts.tolist()),
        )


def _has_causal_row(batch: AttentionBatch, rows: torch.Tensor) -> bool:
    """Whether one of these rows (``[num_reqs]`` bool) is causal."""
    if isinstance(batch.causal, bool):
        return batch.causal and bool(rows.any())
    causal = batch.host_causal()[: batch.num_reqs]
    return bool((rows & torch.tensor(causal, dtype=torch.bool)).any())


class DCPStepMetadata(Protocol):
    """What the collectives ask of the metadata of a step."""

    @property
    def dcp(self) -> AscendDCPMetadata:
        """How this step is shared."""


class DCPImplMixin:
    """Collectives of a layer; mixed into the implementation of a backend.

    Attributes:
        dcp_group: The ranks that share the keys, each with its own heads.
    """

    dcp_group: DCPGroup

    def over_all_keys(
        self, queries: Tensors, attend: Attend, metadata: DCPStepMetadata
    ) -> PartialAttention:
        """This rank's heads over the keys of all ranks; every rank must call it.

        Args:
            queries: ``[T, N / size, size of a head]`` each, of this rank's heads.
            attend: Attends with the heads of all ranks over this rank's keys.
            metadata: Of this step.

        Returns:
            out ``[T, N / size, D]`` and lse ``[T, N / size]``, merged over the ranks.
        """
        if metadata.dcp.shard.size == 1:
            return attend(queries)
        if not metadata.dcp.exchanges:
            return without_keys(queries[0])
        if self.dcp_group.size == 1:  # all heads are here: other ranks share the tokens instead
            return attend(queries)
        return merge_partials(self._exchange_heads(attend(self._gather_heads(*queries))))

    def _gather_heads(self, *tensors: torch.Tensor) -> Tensors:
        """``[T, N, D]`` with the heads of all ranks, for ``[T, N / size, D]`` of this one."""
        sizes = [tensor.shape[-1] for tensor in tensors]
        gathered = torch.cat(self.dcp_group.all_gather(torch.cat(tensors, -1)), 1)
        parts: Tensors = gathered.split(sizes, -1)
        return parts

    def _exchange_heads(self, part: PartialAttention) -> list[PartialAttention]:
        """This rank's heads of the partial results of every rank."""
        sent = packed(part).chunk(self.dcp_group.size, 1)
        return [unpacked(rows) for rows in self.dcp_group.all_to_all(sent)]

    def _check_shard(self, found: ContextShard, rank: int, size: int) -> None:
        if (found.rank, found.size) != (rank, size):
            raise InvalidFieldError(
                "metadata.dcp.shard",
                f"rank {found.rank} of {found.size}",
                f"rank {rank} of {size}, as the group",
            )


def packed(part: PartialAttention) -> torch.Tensor:
    """``[T, N, D + 1]`` float32: a partial result as one tensor to send."""
    return torch.cat([part.out.float(), part.lse[..., None]], -1)


def unpacked(rows: torch.Tensor) -> PartialAttention:
    """The partial result that :func:`packed` packed."""
    return PartialAttention(rows[..., :-1], rows[..., -1])


def without_keys(query: torch.Tensor) -> PartialAttention:
    """The neutral partial result for queries ``[T, N, D]``, on their device."""
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    return PartialAttention(torch.zeros_like(query), lse)


def merge_shards(parts: Sequence[PartialAttention], rank: int) -> PartialAttention:
    """What a rank has after the exchange, from the partial results of all ranks in one process.

    Args:
        parts: Of each rank: out ``[T, N, D]`` and lse ``[T, N]`` with all heads.
        rank: The rank whose heads are wanted: the ``rank``-th of as many equal groups as parts.

    Returns:
        ``[T, N / size, D]`` and ``[T, N / size]``, merged; rows without keys on any rank have out 0
        and lse -inf.

    Raises:
        InvalidFieldError: The heads do not divide into as many groups, or there is no such rank.
    """
    return merge_partials([_heads_of_rank(part, rank, len(parts)) for part in parts])


def _heads_of_rank(part: PartialAttention, rank: int, size: int) -> PartialAttention:
    """The ``rank``-th of ``size`` equal groups of heads."""
    heads = part.lse.shape[1]
    if heads % size:
        raise InvalidFieldError("heads", heads, f"a multiple of {size} ranks")
    if not 0 <= rank < size:
        raise InvalidFieldError("rank", rank, f"0 to {size - 1}")
    own = slice(rank * heads // size, (rank + 1) * heads // size)
    return PartialAttention(part.out[:, own], part.lse[:, own])

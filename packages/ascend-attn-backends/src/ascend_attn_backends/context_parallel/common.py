"""What every backend shares when the keys of a request are spread over ranks.

A rank keeps the keys that :class:`ContextShard` gives it and a share of the query heads. A step
gathers the heads of all ranks, attends with all heads over the rank's own keys, exchanges the
partial results so that each rank gets its own heads back, and merges them by their lse.

The causal mask of the operators is aligned to a request's last key, which says nothing about a
shard: query i of several does not see the first keys of a shard up to a fixed distance. So a step
in which a causal request has several tokens is split. The cached keys before this step are seen
by every query and need no mask; the keys of this step are at hand on every rank and need the usual
causal mask. Source of the split: vllm-ascend, attention/context_parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ascend_attn_ops import PartialAttention, merge_partials

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..standard.builder import covered_starts, host_key_counts
from .group import DCPGroup
from .shard import ContextShard


@attrs.frozen(kw_only=True)
class AscendDCPMetadata:
    """What decode context parallelism adds to the metadata of a step.

    Attributes:
        shard: This rank's share.
        splits_current: Whether this step's keys are attended to apart from the cached ones.
        cached_lens: ``[num_reqs]`` keys that are read from the caches of all ranks together: those
            before this step, or all where the step is not split. 0 for requests without tokens.
        num_computed_tokens_of_dcp: ``[num_reqs][size]`` the same, on each rank.
    """

    shard: ContextShard
    splits_current: bool
    cached_lens: tuple[int, ...]
    num_computed_tokens_of_dcp: tuple[tuple[int, ...], ...]

    @property
    def local_cached_lens(self) -> tuple[int, ...]:
        """``[num_reqs]`` keys that are read from this rank's cache."""
        return tuple(counts[self.shard.rank] for counts in self.num_computed_tokens_of_dcp)

    @property
    def exchanges(self) -> bool:
        """Whether the ranks exchange results; the same on every rank, so that none waits."""
        return self.shard.size > 1 and any(self.cached_lens)


@attrs.frozen(slots=False)
class DCPMetadataBuilderMixin:
    """Builds :class:`AscendDCPMetadata`; mixed into the builder of a backend.

    Attributes:
        shard: This rank's share of the keys.
    """

    shard: ContextShard = attrs.field(kw_only=True, default=ContextShard())

    def dcp_metadata(self, batch: AttentionBatch) -> AscendDCPMetadata:
        """Lengths of every rank, from the batch's host copies.

        ``batch.seq_lens`` counts the keys of all ranks; block table and slots are this rank's own.
        Requests may have different numbers of tokens. Rows without keys keep length 0, also where
        a padding row owns tokens.
        """
        starts = torch.tensor(covered_starts(batch))
        keys, lens = torch.tensor(host_key_counts(batch), dtype=torch.int64), starts.diff()
        split = _has_causal_row(batch, lens > 1)
        cached = ((keys - lens).clamp(min=0) if split else keys) * (lens > 0)
        counts = self.shard.counts_on_all_ranks(cached)
        return AscendDCPMetadata(
            shard=self.shard,
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


class DCPImplMixin:
    """Collectives of a layer; mixed into the implementation of a backend.

    Attributes:
        dcp_group: The ranks that share the keys.
    """

    dcp_group: DCPGroup

    def _gather_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[T, N, D]`` with the heads of all ranks, for ``[T, N / size, D]`` of this one."""
        sizes = [tensor.shape[-1] for tensor in tensors]
        gathered = torch.cat(self.dcp_group.all_gather(torch.cat(tensors, -1)), 1)
        parts: tuple[torch.Tensor, ...] = gathered.split(sizes, -1)
        return parts

    def _exchange(self, part: PartialAttention) -> list[PartialAttention]:
        """This rank's heads of the partial results of every rank."""
        packed = torch.cat([part.out.float(), part.lse[..., None]], -1)
        received = self.dcp_group.all_to_all(list(packed.chunk(self.dcp_group.size, 1)))
        return [PartialAttention(rows[..., :-1], rows[..., -1]) for rows in received]


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
    return merge_partials([heads_of_rank(part, rank, len(parts)) for part in parts])


def heads_of_rank(part: PartialAttention, rank: int, size: int) -> PartialAttention:
    """The ``rank``-th of ``size`` equal groups of heads.

    Raises:
        InvalidFieldError: The heads do not divide into ``size`` groups, or there is no such rank.
    """
    heads = part.lse.shape[1]
    if heads % size:
        raise InvalidFieldError("heads", heads, f"a multiple of {size} ranks")
    if not 0 <= rank < size:
        raise InvalidFieldError("rank", rank, f"0 to {size - 1}")
    own = slice(rank * heads // size, (rank + 1) * heads // size)
    return PartialAttention(part.out[:, own], part.lse[:, own])

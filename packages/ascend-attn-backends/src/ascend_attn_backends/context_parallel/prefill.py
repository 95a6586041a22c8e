"""Prefill context parallelism: the tokens of a prompt are spread over ranks.

Every rank computes projections and attention for its own tokens only. The keys of the step are
gathered and written before attention, so that each rank's cache holds what it must: all keys, or
its share of them. A piece of a prompt is then a request of its own: its tokens see the cached keys
before the piece, and each other. Requests that decode or verify drafts stay whole on every rank;
what a request is doing decides, not how many tokens it has (:meth:`AttentionBatch.split`).

Where the ranks share the keys, the tokens of all ranks are gathered, each rank attends with all of
them over its own keys, and each rank gets the partial results of its tokens back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import attrs
import torch

from ascend_attn_ops import PartialAttention, merge_partials

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..standard.builder import covered_starts
from ..transfer import copy_to_device
from .common import (
    Attend,
    DCPImplMixin,
    DCPMetadataBuilderMixin,
    DCPStepMetadata,
    Tensors,
    packed,
    unpacked,
)
from .group import DCPGroup
from .shard import check_rank


@attrs.frozen
class TokenSegment:
    """Consecutive tokens of one request in this step.

    Attributes:
        row: The request.
        first: First token, counted from the request's first token in this step.
        last: Behind the last token.
    """

    row: int
    first: int
    last: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the segment."""
        return self.last - self.first


@attrs.frozen(kw_only=True)
class PrefillShard:
    """One rank's share of the tokens of every prefill.

    A prefill of L tokens is cut into ``2 * size`` chunks of ``ceil(L / (2 * size))``; rank r has
    the chunks r and ``2 * size - 1 - r``, so that early tokens with few keys and late tokens with
    many balance (vLLM and vllm-ascend cut like this). Short prefills leave some ranks without
    tokens.

    Attributes:
        rank: This rank, from 0.
        size: Ranks P that share the tokens.

    Raises:
        InvalidFieldError: The size is below 1, or the rank is not below it.
    """

    rank: int = 0
    size: int = 1

    def __attrs_post_init__(self) -> None:
        check_rank(self.rank, self.size)

    def segments(self, row: int, num_tokens: int) -> tuple[TokenSegment, ...]:
        """This rank's segments of a prefill of ``num_tokens`` tokens, in order of tokens."""
        width = -(-num_tokens // (2 * self.size))
        starts = (self.rank * width, (2 * self.size - 1 - self.rank) * width)
        cut = (TokenSegment(row, first, min(first + width, num_tokens)) for first in starts)
        return tuple(segment for segment in cut if segment.num_tokens > 0)


@attrs.frozen(eq=False, kw_only=True)
class AscendPCPMetadata:
    """What prefill context parallelism adds to the metadata of a step.

    Rows of tokens come in three orders: that of the step (the batch), that of a rank (the
    replicated tokens, then its segments), and the gathered one (the replicated tokens, then the
    segments of rank 0, of rank 1 and so on).

    Attributes:
        prefill: This rank's share of the tokens.
        shares_keys: Whether these ranks also share the keys; if not, each has them all.
        num_replicated: Tokens of decode and verification, computed by every rank.
        num_split: Prefill tokens of each rank.
        own_tokens: ``[num_own]`` int64 on the device: the token of the step in each row of a rank.
        gathered_places: ``[num_tokens]`` int64 on the device: the gathered row of each token of the
            step.
    """

    prefill: PrefillShard
    shares_keys: bool
    num_replicated: int
    num_split: tuple[int, ...]
    own_tokens: torch.Tensor
    gathered_places: torch.Tensor

    @property
    def num_own(self) -> int:
        """Tokens that this rank computes."""
        return self.num_replicated + self.num_split[self.prefill.rank]

    def own_rows(self, step_rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor ``[num_tokens or more, ...]`` in the order of the step."""
        return step_rows.index_select(0, self.own_tokens)

    def step_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, ...]`` in the order of the step, of rows in the gathered order."""
        return gathered.index_select(0, self.gathered_places)


@attrs.frozen(eq=False)
class TokenPlan:
    """How the tokens of a step are spread.

    Attributes:
        replicated: Segments that every rank computes.
        split: Segments of each rank.
    """

    replicated: tuple[TokenSegment, ...]
    split: tuple[tuple[TokenSegment, ...], ...]

    @property
    def gathered(self) -> tuple[TokenSegment, ...]:
        """All segments in the gathered order."""
        return (*self.replicated, *chain.from_iterable(self.split))

    def of_rank(self, rank: int) -> tuple[TokenSegment, ...]:
        """The segments of a rank in its order."""
        return (*self.replicated, *self.split[rank])


@attrs.frozen(slots=False)
class PCPMetadataBuilderMixin(DCPMetadataBuilderMixin):
    """Spreads the tokens of a step; mixed into the builder of a backend.

    Attributes:
        shard: This rank's share of the keys.
        prefill: This rank's share of the tokens.
        shares_keys: Whether the ranks that share tokens also share the keys. Then ``shard.size`` is
            a multiple of ``prefill.size``, D times it, where D is the number of ranks that share
            the heads, and rank d of them has key shard ``prefill.rank * D + d``. If not, ``shard``
            is that of the ranks that share the heads.
        num_spec_tokens: Drafts per request, k; see :meth:`AttentionBatch.split`.

    Raises:
        InvalidFieldError: The two shares do not fit together.
    """

    prefill: PrefillShard = attrs.field(kw_only=True, default=PrefillShard())
    shares_keys: bool = attrs.field(kw_only=True, default=True)
    num_spec_tokens: int = attrs.field(kw_only=True, default=0)

    def __attrs_post_init__(self) -> None:
        if not self.shares_keys:
            return
        shard, prefill = self.shard, self.prefill
        if shard.size % prefill.size:
            raise InvalidFieldError("shard.size", shard.size, f"a multiple of {prefill.size}")
        heads = shard.size // prefill.size
        if shard.rank // heads != prefill.rank:
            first = prefill.rank * heads
            allowed = f"{first} to {first + heads - 1}, of prefill rank {prefill.rank}"
            raise InvalidFieldError("shard.rank", shard.rank, allowed)

    def token_plan(self, batch: AttentionBatch) -> TokenPlan:
        """Spread the tokens of a step; the same plan on every rank.

        Raises:
            AttentionBatchError: ``is_prefilling`` is None although a request has several tokens.
        """
        split, causal = batch.split(self.num_spec_tokens), batch.host_causal()
        lens = batch.host_query_starts().diff().tolist()
        rows = [row for row in split.prefill.rows if causal[row]]
        spread = set(rows)
        whole = [row for row in range(batch.num_reqs) if lens[row] and row not in spread]
        ranks = [
            PrefillShard(rank=rank, size=self.prefill.size) for rank in range(self.prefill.size)
        ]
        return TokenPlan(
            replicated=tuple(TokenSegment(row, 0, lens[row]) for row in whole),
            split=tuple(
                tuple(segment for row in rows for segment in rank.segments(row, lens[row]))
                for rank in ranks
            ),
        )

    def pcp_metadata(self, batch: AttentionBatch, plan: TokenPlan) -> AscendPCPMetadata:
        """The metadata of a plan; nothing is read from the device but missing host lengths."""
        tokens = _token_numbers(batch, plan.gathered)
        places = torch.empty_like(tokens)
        places[tokens] = torch.arange(len(tokens))
        own = _token_numbers(batch, plan.of_rank(self.prefill.rank))
        return AscendPCPMetadata(
            prefill=self.prefill,
            shares_keys=self.shares_keys,
            num_replicated=sum(segment.num_tokens for segment in plan.replicated),
            num_split=tuple(sum(s.num_tokens for s in segments) for segments in plan.split),
            own_tokens=copy_to_device(own, batch.device),
            gathered_places=copy_to_device(places, batch.device),
        )

    def read_batch(self, batch: AttentionBatch, plan: TokenPlan) -> AttentionBatch:
        """The rows with which this rank reads its cache: those of all ranks, or its own."""
        segments = plan.gathered if self.shares_keys else plan.of_rank(self.prefill.rank)
        return segment_batch(batch, segments)


def with_exact_starts(batch: AttentionBatch) -> AttentionBatch:
    """The batch with repaired query starts on the host; they decide who computes what."""
    starts = torch.tensor(covered_starts(batch), dtype=torch.int32)
    padding = starts[-1:].expand(batch.num_padded_reqs)
    return attrs.evolve(batch, query_start_loc_cpu=torch.cat([starts, padding]))


def segment_batch(batch: AttentionBatch, segments: Sequence[TokenSegment]) -> AttentionBatch:
    """The batch in which each segment is a request: the keys up to its last token, and its tokens.

    Args:
        batch: The step.
        segments: Segments of its requests, in the order that the new batch shall have.

    Returns:
        A batch without padding. Nothing is read from the device but missing host query starts.
    """
    rows = torch.tensor([segment.row for segment in segments], dtype=torch.int64)
    lens = torch.tensor([segment.num_tokens for segment in segments], dtype=torch.int64)
    behind = batch.host_query_starts().diff().long()[rows]
    behind -= torch.tensor([segment.last for segment in segments], dtype=torch.int64)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).int()
    tokens = copy_to_device(_token_numbers(batch, segments), batch.device)
    return attrs.evolve(
        batch,
        **_rows_of(batch, rows, behind),
        query_start_loc=copy_to_device(starts, batch.device),
        query_start_loc_cpu=starts,
        slot_mapping=batch.slot_mapping.index_select(0, tokens),
        num_reqs=len(segments),
        num_tokens=int(starts[-1]),
        num_padded_reqs=0,
        num_padded_tokens=0,
        max_query_len=max(lens.tolist(), default=0),
    )


def _rows_of(batch: AttentionBatch, rows: torch.Tensor, behind: torch.Tensor) -> dict[str, Any]:
    """The fields with one entry per request, for these rows.

    Args:
        batch: The step.
        rows: int64 in host memory.
        behind: Tokens of this step behind each of them, whose keys it does not have.
    """
    device_rows, device_behind = (copy_to_device(part, batch.device) for part in (rows, behind))
    host_lengths = ("seq_lens_cpu", "seq_lens_cpu_upper_bound")
    places = dict.fromkeys((*host_lengths, "causal_cpu", "is_prefilling"), rows)
    places |= dict.fromkeys(("seq_lens", "block_table", "causal"), device_rows)
    fields = {
        name: value.index_select(0, place)
        for name, place in places.items()
        if isinstance(value := getattr(batch, name), torch.Tensor)
    }
    for name, cut in (("seq_lens", device_behind), *((name, behind) for name in host_lengths)):
        if name in fields:
            fields[name] = (fields[name] - cut).clamp(min=0).int()
    return fields


def _token_numbers(batch: AttentionBatch, segments: Sequence[TokenSegment]) -> torch.Tensor:
    """``[num_tokens]`` int64 in host memory: the token of the step in each row of the segments."""
    starts = batch.host_query_starts().tolist()
    ranges = [torch.arange(starts[s.row] + s.first, starts[s.row] + s.last) for s in segments]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *ranges])


class PCPImplMixin(DCPImplMixin):
    """Collectives of a layer whose tokens are spread; mixed into its implementation.

    Attributes:
        pcp_group: The ranks that share the tokens, each with the same heads.
    """

    pcp_group: DCPGroup

    def over_all_keys(
        self, queries: Tensors, attend: Attend, metadata: DCPStepMetadata
    ) -> PartialAttention:
        """This rank's tokens and heads over the keys of all ranks; every rank must call it.

        Args:
            queries: ``[num_own, N / size, size of a head]`` each.
            attend: Attends with the tokens and heads of all ranks over this rank's keys, or with
                this rank's tokens where each rank has all keys.
            metadata: Of this step.

        Returns:
            out ``[num_own, N / size, D]`` and lse ``[num_own, N / size]``.
        """
        pcp = spread_of(metadata)
        if not (pcp.shares_keys and metadata.dcp.exchanges):
            return super().over_all_keys(queries, attend, metadata)
        part = super().over_all_keys(self.gather_tokens(queries, pcp), attend, metadata)
        return merge_partials([unpacked(rows) for rows in self.send_tokens(packed(part), pcp)])

    def gather_tokens(self, rows: Tensors, pcp: AscendPCPMetadata) -> Tensors:
        """Rows of the tokens of all ranks in the gathered order; every rank must call it.

        Args:
            rows: ``[num_own or more, ...]`` each, of this rank's tokens, of one dtype.
            pcp: How the tokens are spread.

        Returns:
            ``[num_tokens, ...]`` each.
        """
        flat = torch.cat([part[: pcp.num_own].flatten(1) for part in rows], 1)
        shared, split = flat[: pcp.num_replicated], flat[pcp.num_replicated :]
        gathered = [shared]
        if any(pcp.num_split):
            received = self.pcp_group.all_gather(_lengthened(split, max(pcp.num_split)))
            gathered += [part[:count] for part, count in zip(received, pcp.num_split, strict=True)]
        widths = [part.shape[1:].numel() for part in rows]
        whole = torch.cat(gathered).split(widths, 1)
        return tuple(w.unflatten(1, part.shape[1:]) for w, part in zip(whole, rows, strict=True))

    def send_tokens(self, rows: torch.Tensor, pcp: AscendPCPMetadata) -> list[torch.Tensor]:
        """Give every rank the rows of its tokens; every rank must call it.

        Args:
            rows: ``[num_tokens, ...]`` in the gathered order.
            pcp: How the tokens are spread.

        Returns:
            ``[num_own, ...]`` from each rank.
        """
        shared, *split = rows.split([pcp.num_replicated, *pcp.num_split])
        longest = pcp.num_replicated + max(pcp.num_split)
        sent = [_lengthened(torch.cat([shared, part]), longest) for part in split]
        return [part[: pcp.num_own] for part in self.pcp_group.all_to_all(sent)]

    def _check_shares(self, metadata: DCPStepMetadata) -> AscendPCPMetadata:
        """How the tokens of the metadata are spread, after comparing it with the groups."""
        pcp, heads, tokens = spread_of(metadata), self.dcp_group, self.pcp_group
        if (pcp.prefill.rank, pcp.prefill.size) != (tokens.rank, tokens.size):
            raise InvalidFieldError(
                "metadata.pcp.prefill",
                f"rank {pcp.prefill.rank} of {pcp.prefill.size}",
                f"rank {tokens.rank} of {tokens.size}, as the group",
            )
        rank, size = heads.rank, heads.size
        if pcp.shares_keys:
            rank, size = tokens.rank * size + rank, tokens.size * size
        self._check_shard(metadata.dcp.shard, rank, size)
        return pcp


def spread_of(metadata: DCPStepMetadata) -> AscendPCPMetadata:
    """How the tokens of a step are spread.

    Raises:
        InvalidFieldError: The metadata comes from a builder that does not spread tokens.
    """
    pcp = getattr(metadata, "pcp", None)
    if not isinstance(pcp, AscendPCPMetadata):
        raise InvalidFieldError("metadata", type(metadata).__name__, "that of a PCP builder")
    return pcp


def _lengthened(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``[count, ...]``: the rows, then zeros; collectives want one shape from every rank."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])

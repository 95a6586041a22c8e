"""Decode context parallelism of the latent backend."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ascend_attn_ops import PartialAttention, merge_partials

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..latent_layout import LATENT_SIZE, ROPE_SIZE
from ..masks import MaskMode
from ..mla.builder import AscendMLAMetadataBuilder
from ..mla.layer import LatentAttentionLayer
from ..mla.metadata import AscendMLAMetadata
from ..paged_step import check_shape
from ..standard import AttentionLaunch
from .common import (
    AscendDCPMetadata,
    DCPImplMixin,
    DCPMetadataBuilderMixin,
    heads_of_rank,
)
from .group import DCPGroup, SingleRankGroup


@attrs.frozen(eq=False, kw_only=True)
class AscendMlaDCPMetadata(AscendMLAMetadata):
    """Metadata of one step on one rank.

    The lengths of ``launches``, ``max_seq_len`` and ``keyless_tokens`` speak of the keys that are
    read from this rank's cache.

    Attributes:
        dcp: Lengths of all ranks.
    """

    dcp: AscendDCPMetadata


@attrs.frozen
class AscendMlaDCPMetadataBuilder(DCPMetadataBuilderMixin, AscendMLAMetadataBuilder):
    """A pure function from batch to metadata, on one rank.

    Attributes:
        block_size: Tokens per cache block.
        shard: This rank's share of the keys.
    """

    def build(self, batch: AttentionBatch) -> AscendMlaDCPMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Args:
            batch: Lengths of all ranks together, block table and slots of this rank; see
                :func:`sharded_batch`.

        Raises:
            AttentionBatchError: The block table has fewer columns than a request has blocks here.
        """
        dcp = self.dcp_metadata(batch)
        keys = list(dcp.local_cached_lens)
        return AscendMlaDCPMetadata(**self._latent_fields(batch, keys), dcp=dcp)


@attrs.frozen(eq=False, kw_only=True)
class LatentRankStep:
    """What one rank brings to a step of one layer.

    Attributes:
        q_nope: ``[num_token_rows, N / size, 512]`` absorbed queries of this rank's heads.
        q_pe: ``[num_token_rows, N / size, 64]`` rotated queries.
        latent: ``[num_token_rows, 512]`` latents of this step's tokens, the same on every rank.
        rope: ``[num_token_rows, 64]`` rotated keys.
        latent_cache: ``[num_blocks, 1, block_size, 512]`` view of this rank's cache, this step's
            own rows already written.
        rope_cache: ``[num_blocks, 1, block_size, 64]`` view.
        metadata: Of this step on this rank.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    latent_cache: torch.Tensor
    rope_cache: torch.Tensor
    metadata: AscendMlaDCPMetadata


class AscendMlaDCPImpl(DCPImplMixin, LatentAttentionLayer):
    """Absorbed latent attention of one layer over keys that ranks share.

    The lse that the merge needs is allowed beside ropes by the documents of the operator, and
    vllm-ascend asks for it; the checker that CANN had in November 2025 refused it (561002).

    Args:
        num_heads: Query heads on this rank, N / size.
        scale: Factor on the scores; see :class:`LatentAttentionLayer`.
        dcp_group: The ranks; None means this one alone.
        latent_size: Elements of a latent row; products take 512.
        rope_size: Elements of a rotary row; products take 64.

    Raises:
        InvalidFieldError: A count is not positive.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        dcp_group: DCPGroup | None = None,
        latent_size: int = LATENT_SIZE,
        rope_size: int = ROPE_SIZE,
    ) -> None:
        super().__init__(num_heads, scale, latent_size, rope_size)
        self.dcp_group = SingleRankGroup() if dcp_group is None else dcp_group

    def forward_mqa(self, step: LatentRankStep, output: torch.Tensor) -> torch.Tensor:
        """Attention of this step's tokens over the keys of all ranks; every rank must call it.

        Args:
            step: What this rank brings.
            output: ``[num_token_rows, N / size, 512]``, written in place. Rows after
                ``metadata.num_tokens`` (padding) and rows without any key become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or the metadata was
                built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self.check(step, output)
        shard = step.metadata.dcp.shard
        if (shard.rank, shard.size) != (self.dcp_group.rank, self.dcp_group.size):
            raise InvalidFieldError(
                "metadata.dcp.shard",
                f"rank {shard.rank} of {shard.size}",
                f"rank {self.dcp_group.rank} of {self.dcp_group.size}, as the group",
            )
        queries = _real_rows(step)
        if not step.metadata.dcp.exchanges:
            parts = [self.over_cache(queries, step)]
        else:
            gathered = self._gather_heads(*queries)
            parts = self._exchange(self.over_cache((gathered[0], gathered[1]), step))
        return self.finish(parts, step, output)

    def over_cache(
        self, queries: tuple[torch.Tensor, torch.Tensor], step: LatentRankStep
    ) -> PartialAttention:
        """Attention of the given heads over this rank's cached keys, without a mask.

        Args:
            queries: ``[T, heads, 512]`` and ``[T, heads, 64]``, of all ranks' heads in an exchange.
            step: What this rank brings.

        Returns:
            out ``[T, heads, 512]`` and lse ``[T, heads]``; tokens whose request has no key here
            have out 0 and lse -inf, by length, whatever the operator wrote.
        """
        metadata = step.metadata
        whole = _empty(queries[0])
        caches = self._cache_views(step.latent_cache, step.rope_cache, metadata.block_size)
        for launch in metadata.launches:
            if any(launch.seq_lens):
                result = self._call(
                    (launch.gather(queries[0]), launch.gather(queries[1])),
                    caches,
                    actual_seq_lengths=launch.query_lens_cumulative,
                    actual_seq_lengths_kv=launch.seq_lens,
                    block_table=launch.block_table,
                    sparse_mode=0,
                    block_size=metadata.block_size,
                    softmax_lse_flag=True,
                )
                _put(result, launch, whole)
        return metadata.neutral(whole)

    def over_current(self, step: LatentRankStep) -> PartialAttention:
        """Attention of this rank's heads over this step's own keys, from the given rows.

        Returns:
            out ``[T, N / size, 512]`` and lse ``[T, N / size]``.
        """
        metadata = step.metadata
        whole = _empty(step.q_nope[: metadata.num_tokens])
        latent, rope = step.latent[:, None], step.rope[:, None]
        for launch in metadata.launches:
            mode = MaskMode.for_window(None, causal=launch.causal)
            result = self._call(
                (launch.gather(step.q_nope), launch.gather(step.q_pe)),
                (launch.gather(latent), launch.gather(rope)),
                atten_mask=metadata.causal_template if mode.needs_template else None,
                actual_seq_lengths=launch.query_lens_cumulative,
                actual_seq_lengths_kv=launch.query_lens_cumulative,
                sparse_mode=mode.sparse_mode,
                softmax_lse_flag=True,
            )
            _put(result, launch, whole)
        return whole

    def finish(
        self, parts: Sequence[PartialAttention], step: LatentRankStep, output: torch.Tensor
    ) -> torch.Tensor:
        """Merge this rank's heads of all parts, and this step's own keys where they are apart.

        Returns:
            ``output`` itself, written in place.
        """
        metadata = step.metadata
        if metadata.dcp.splits_current:
            parts = [*parts, self.over_current(step)]
        output[: metadata.num_tokens] = merge_partials(parts).out
        output[metadata.num_tokens :].zero_()
        return output

    def check(self, step: LatentRankStep, output: torch.Tensor) -> None:
        """Compare the shapes of a step with the layer.

        Raises:
            InvalidFieldError: A shape does not fit; names the tensor.
        """
        rows = step.metadata.num_tokens
        self._check_queries(step.q_nope, step.q_pe, rows)
        check_shape("latent", step.latent, rows, self.latent_size)
        check_shape("rope", step.rope, rows, self.rope_size)
        check_shape("output", output, rows, self.num_heads, self.latent_size)


def forward_mqa_over_shards(
    impl: AscendMlaDCPImpl, steps: Sequence[LatentRankStep], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What all ranks compute, in one process and without a group: for tests and for tracing.

    Args:
        impl: The layer; its group is not used.
        steps: What each rank brings, in the order of ranks.
        outputs: Of each rank, ``[num_token_rows, N / size, 512]``, written in place.

    Returns:
        The outputs.

    Raises:
        InvalidFieldError: A shape does not fit the layer or the metadata.
    """
    for step, output in zip(steps, outputs, strict=True):
        impl.check(step, output)
    queries = [_real_rows(step) for step in steps]
    nope, rope = (torch.cat(part, 1) for part in zip(*queries, strict=True))
    parts = [impl.over_cache((nope, rope), step) for step in steps]
    return [
        impl.finish([heads_of_rank(part, rank, len(steps)) for part in parts], step, output)
        for rank, (step, output) in enumerate(zip(steps, outputs, strict=True))
    ]


def _real_rows(step: LatentRankStep) -> tuple[torch.Tensor, torch.Tensor]:
    rows = step.metadata.num_tokens
    return step.q_nope[:rows], step.q_pe[:rows]


def _empty(query: torch.Tensor) -> PartialAttention:
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    return PartialAttention(torch.zeros_like(query), lse)


def _put(
    result: tuple[torch.Tensor, torch.Tensor], launch: AttentionLaunch, whole: PartialAttention
) -> None:
    part = PartialAttention.from_infinite_lse(*result)
    launch.scatter(part.out, whole.out)
    launch.scatter(part.lse, whole.lse)

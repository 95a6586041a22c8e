"""Prefill context parallelism of the latent backend, with or without shared keys."""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..standard import AttentionLaunch
from .latent_ranks import LatentPCPLayer
from .launches import SharedKeysMetadata, SharedKeysMetadataBuilder
from .mla import AscendMlaDCPImpl, LatentRankStep
from .prefill import (
    AscendPCPMetadata,
    PCPMetadataBuilderMixin,
    segment_batch,
    with_exact_starts,
)


@attrs.frozen(eq=False, kw_only=True)
class AscendMlaPCPMetadata(SharedKeysMetadata):
    """Metadata of one step on one rank; see :class:`SharedKeysMetadata` for the other fields.

    ``num_tokens`` and ``launches`` speak of the rows that read this rank's cache: the tokens of all
    ranks in the gathered order, or this rank's own where each rank has all keys.

    Attributes:
        pcp: How the tokens are spread.
        own_launches: Calls over the keys of this rank's own tokens.
        slot_mapping: ``[num_tokens of the step]`` int64, in the gathered order.
    """

    pcp: AscendPCPMetadata
    own_launches: tuple[AttentionLaunch, ...]

    @property
    def num_own_tokens(self) -> int:
        """Tokens that this rank computes."""
        return self.pcp.num_own

    @property
    def current_launches(self) -> tuple[AttentionLaunch, ...]:
        """:attr:`own_launches`."""
        return self.own_launches


@attrs.frozen
class AscendMlaPCPMetadataBuilder(PCPMetadataBuilderMixin, SharedKeysMetadataBuilder):
    """A pure function from batch to metadata, on one rank.

    Attributes:
        block_size: Tokens per cache block.
        shard: This rank's share of the keys.
        prefill: This rank's share of the tokens.
        shares_keys: See :class:`PCPMetadataBuilderMixin`.
        num_spec_tokens: Drafts per request, k.
    """

    def build(self, batch: AttentionBatch) -> AscendMlaPCPMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Args:
            batch: All tokens of the step with :attr:`AttentionBatch.is_prefilling`, lengths of all
                ranks together, block table and slots of this rank; see :func:`sharded_batch`.

        Raises:
            AttentionBatchError: The block table has fewer columns than a request has blocks here,
                or ``is_prefilling`` is None although a request has several tokens.
        """
        batch = with_exact_starts(batch)
        plan = self.token_plan(batch)
        own = segment_batch(batch, plan.of_rank(self.prefill.rank))
        fields = self._shared_fields(self.read_batch(batch, plan))
        return AscendMlaPCPMetadata(
            **fields | {"slot_mapping": segment_batch(batch, plan.gathered).slot_mapping},
            pcp=self.pcp_metadata(batch, plan),
            own_launches=self._fields(own, [0] * own.num_reqs)["launches"],
        )


class AscendMlaPCPImpl(LatentPCPLayer, AscendMlaDCPImpl):
    """Absorbed latent attention of one layer whose tokens, and perhaps keys, are spread over ranks.

    A step of a layer: project this rank's tokens (``metadata.pcp.own_rows``), then
    :meth:`gather_and_write_kv`, then :meth:`forward_mqa` with the latents of these same tokens.

    See :class:`LatentPCPLayer` for its arguments.
    """

    def forward_mqa(self, step: LatentRankStep, output: torch.Tensor) -> torch.Tensor:
        """Attention of this rank's tokens over the keys of all ranks; every rank must call it.

        Args:
            step: What this rank brings; the rows are those of its tokens, in its order.
            output: ``[num_own_tokens or more, N, 512]``, written in place. Rows after
                ``metadata.num_own_tokens`` and rows without any key become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or the metadata was
                built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self._check_shapes(step, output)
        self._check_shares(step.metadata)
        return self._attend_shared(step, output)

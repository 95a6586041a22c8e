"""Decode context parallelism of the latent backend."""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..mla.layer import LatentAttentionLayer
from ..paged_step import check_shape
from .common import Tensors
from .latent_ranks import LatentDCPLayer
from .launches import SharedKeysLayer, SharedKeysMetadata, SharedKeysMetadataBuilder


@attrs.frozen(eq=False, kw_only=True)
class AscendMlaDCPMetadata(SharedKeysMetadata):
    """Metadata of one step on one rank; see :class:`SharedKeysMetadata` for its fields."""


@attrs.frozen
class AscendMlaDCPMetadataBuilder(SharedKeysMetadataBuilder):
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
        return AscendMlaDCPMetadata(**self._shared_fields(batch))


@attrs.frozen(eq=False, kw_only=True)
class LatentRankStep:
    """What one rank brings to a step of one layer.

    Attributes:
        q_nope: ``[num_token_rows, N / size, 512]`` absorbed queries of this rank's heads.
        q_pe: ``[num_token_rows, N / size, 64]`` rotated queries.
        latent: ``[num_token_rows, 512]`` latents of the same tokens.
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
    metadata: SharedKeysMetadata

    @property
    def queries(self) -> Tensors:
        """Absorbed and rotated queries."""
        return self.q_nope, self.q_pe


class AscendMlaDCPImpl(LatentDCPLayer, LatentAttentionLayer, SharedKeysLayer):
    """Absorbed latent attention of one layer over keys that ranks share.

    The lse that the merge needs is allowed beside ropes by the documents of the operator, and
    vllm-ascend asks for it; the checker that CANN had in November 2025 refused it (561002).

    See :class:`LatentDCPLayer` for its arguments.
    """

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
        self._check_shapes(step, output)
        self._check_shard(step.metadata.dcp.shard, self.dcp_group.rank, self.dcp_group.size)
        return self._attend_shared(step, output)

    def _check_shapes(self, step: LatentRankStep, output: torch.Tensor) -> None:
        rows = step.metadata.num_own_tokens
        self._check_queries(step.q_nope, step.q_pe, rows)
        check_shape("latent", step.latent, rows, self.latent_size)
        check_shape("rope", step.rope, rows, self.rope_size)
        check_shape("output", output, rows, self.num_heads, self.latent_size)

    def _caches(self, step: LatentRankStep) -> Tensors:
        return self._cache_views(step.latent_cache, step.rope_cache, step.metadata.block_size)

    def _current(self, step: LatentRankStep) -> Tensors:
        return step.latent[:, None], step.rope[:, None]

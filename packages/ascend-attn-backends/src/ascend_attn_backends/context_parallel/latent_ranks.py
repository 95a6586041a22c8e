"""What latent layers on several ranks share: their groups, and writing rows of other ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from ..latent_layer import LatentLayer
from ..latent_layout import LATENT_SIZE, ROPE_SIZE
from .common import AscendDCPMetadata, DCPImplMixin
from .group import DCPGroup, group_or_alone
from .prefill import AscendPCPMetadata, PCPImplMixin


class LatentSpreadStep(Protocol):
    """What writing the rows of all ranks asks of the metadata of a step."""

    @property
    def dcp(self) -> AscendDCPMetadata:
        """How the keys are shared."""

    @property
    def pcp(self) -> AscendPCPMetadata:
        """How the tokens are spread."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """``[num_tokens of the step]`` int64, in the gathered order."""


class LatentDCPLayer(DCPImplMixin, LatentLayer):
    """A latent layer over keys that ranks share; mixed into a layer with the operator call.

    Args:
        num_heads: Query heads on this rank, N / size.
        scale: Factor on the scores; see :class:`LatentLayer`.
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
        self.dcp_group = group_or_alone(dcp_group)


class LatentPCPLayer(PCPImplMixin, LatentDCPLayer):
    """A latent layer whose tokens, and perhaps keys, are spread; mixed into one over shared keys.

    Args:
        num_heads: Query heads on this rank.
        scale: Factor on the scores; see :class:`LatentLayer`.
        pcp_group: The ranks that share the tokens; None means this one alone.
        dcp_group: The ranks with the same tokens that share the heads; None means this one alone.
        latent_size: Elements of a latent row; products take 512.
        rope_size: Elements of a rotary row; products take 64.

    Raises:
        InvalidFieldError: A count is not positive.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        pcp_group: DCPGroup | None = None,
        dcp_group: DCPGroup | None = None,
        latent_size: int = LATENT_SIZE,
        rope_size: int = ROPE_SIZE,
    ) -> None:
        super().__init__(num_heads, scale, dcp_group, latent_size, rope_size)
        self.pcp_group = group_or_alone(pcp_group)

    def gather_and_write_kv(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        metadata: LatentSpreadStep,
    ) -> None:
        """Write the rows of all ranks' tokens that belong into this rank's caches, in place.

        Every rank must call it, before it attends.

        Args:
            latent: ``[num_own_tokens or more, 512]`` of this rank's tokens.
            rope: ``[num_own_tokens or more, 64]``.
            latent_cache: ``[num_blocks, 1, block_size, 512]`` view; a product wants it contiguous.
            rope_cache: ``[num_blocks, 1, block_size, 64]`` view.
            metadata: Of this step.

        Raises:
            InvalidFieldError: The metadata was built for another rank.
            ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
        """
        rows = self.gather_tokens((latent, rope), self._check_shares(metadata))
        self.write_kv(rows[0], rows[1], latent_cache, rope_cache, metadata.slot_mapping)

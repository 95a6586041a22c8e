"""Dense latent attention whose key counts stay on the device: all keys are chosen.

The operator of this backend takes key counts as integers of the host, and its absorbed form takes
no mask of its own. sparse_flash_attention computes the same sum over the keys that it is given,
hides what lies behind a request's last key or a token's own position, and takes its lengths from
the device.
"""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..sfa import AscendSFAMetadata, AscendSFAMetadataBuilder

MOST_CHOSEN_KEYS = 1 << 26
"""Tokens times keys of a step up to which it is taken: 256 MiB of indices, shared by all layers."""


@attrs.frozen(eq=False, kw_only=True)
class AllKeysStep:
    """A step in which every token chooses every key.

    Attributes:
        step: Lengths on the device.
        indices: ``[num_tokens, keys]`` int32, 0 up to the largest bound.
    """

    step: AscendSFAMetadata
    indices: torch.Tensor


def all_keys_step(batch: AttentionBatch, block_size: int) -> AllKeysStep | None:
    """The step with its lengths on the device. Reads no device tensor.

    Args:
        batch: The step.
        block_size: Tokens per cache block.

    Returns:
        None where :meth:`AttentionBatch.only_bounds` has none, indices are too large, or requests
        differ in causality.
    """
    bounds = batch.only_bounds(batch.block_table.shape[1] * block_size)
    if not bounds or not isinstance(batch.causal, bool):
        return None
    count = max(bounds)
    if batch.num_tokens * count > MOST_CHOSEN_KEYS:
        return None
    key = torch.arange(count, dtype=torch.int32, device=batch.device)
    step = AscendSFAMetadataBuilder(block_size).build(batch)
    return AllKeysStep(step=step, indices=key.repeat(batch.num_tokens, 1))

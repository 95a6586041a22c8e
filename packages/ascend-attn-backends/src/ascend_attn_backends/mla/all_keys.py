"""Dense latent attention whose key counts stay on the device: all keys are chosen.

The operator of this backend takes key counts as integers of the host, and its absorbed form takes
no mask of its own. sparse_flash_attention computes the same sum over the keys that it is given,
hides what lies behind a request's last key or a token's own position, and takes its lengths from
the device.
"""

from __future__ import annotations

from itertools import accumulate

import attrs
import torch

from ..batch import AttentionBatch
from ..open_tokens import OpenTokens, StepTokens
from ..sfa import AscendSFAMetadata, AscendSFAMetadataBuilder
from ..transfer import copy_to_device

MOST_CHOSEN_KEYS = 1 << 26
"""Tokens times keys of a step up to which it is taken: 256 MiB of indices, shared by all layers."""


@attrs.frozen(eq=False, kw_only=True)
class AllKeysStep(StepTokens):
    """Tokens that choose every key of their request; see :class:`StepTokens` for its other fields.

    Attributes:
        step: Lengths on the device; requests of known length have no tokens here.
        indices: ``[num_tokens, keys]`` int32, 0 up to the largest bound.
    """

    step: AscendSFAMetadata
    indices: torch.Tensor


def all_keys_step(batch: AttentionBatch, block_size: int, opened: OpenTokens) -> AllKeysStep | None:
    """The open tokens of a step. Reads no device tensor.

    Args:
        batch: The step.
        block_size: Tokens per cache block.
        opened: Its open tokens, at least one.

    Returns:
        None where indices are too large or requests differ in causality.
    """
    count = max(opened.bounds)
    if opened.num_tokens * count > MOST_CHOSEN_KEYS or not isinstance(batch.causal, bool):
        return None
    step = AscendSFAMetadataBuilder(block_size).build(batch)
    if opened.query_lens is not None:
        ends = torch.tensor(list(accumulate(opened.query_lens)), dtype=torch.int32)
        query_ends = copy_to_device(ends, batch.device)
        step = attrs.evolve(step, num_tokens=opened.num_tokens, query_ends=query_ends)
    key = torch.arange(count, dtype=torch.int32, device=batch.device)
    return AllKeysStep(**opened.places(), step=step, indices=key.repeat(opened.num_tokens, 1))

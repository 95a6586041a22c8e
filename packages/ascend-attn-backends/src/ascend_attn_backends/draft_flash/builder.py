"""Builds the draft backend's metadata from device lengths, once per step."""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import AttentionBatchError
from ..masks import SHARED_MASKS, AttentionMaskBuilder
from ..plan_cache import PlanCache, StepLengths
from ..starts import repair_starts
from .metadata import AscendFlashAttentionMetadata
from .steps import accepted_query_lens, accepted_slots, check_rejected


@attrs.frozen
class AscendFlashAttentionMetadataBuilder:
    """A pure function from batch to metadata that reads no length, on no path.

    Rows that a runner left dirty are repaired on the device: starts are clamped to the step's
    tokens and made monotone, so that a stale or negative start makes an empty row; every request
    has at least one key, because the operator's plan has no use for an empty one, and no more keys
    than its block row has slots.

    Attributes:
        block_size: Tokens per cache block.
        masks: Where the mask template comes from; by default one template per device and process.
        plans: Plans that the steps of this builder share; by default a cache of its own.
    """

    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    masks: AttentionMaskBuilder = attrs.field(default=SHARED_MASKS, kw_only=True)
    plans: PlanCache = attrs.field(factory=PlanCache, kw_only=True)

    def build(
        self, batch: AttentionBatch, num_rejected: torch.Tensor | None = None
    ) -> AscendFlashAttentionMetadata:
        """Metadata of one step.

        Args:
            batch: The step. Its host copies are not used.
            num_rejected: ``[num_reqs]`` int32 on the batch's device: the last so many tokens of
                each request are drafts that the target rejected. They get no attention (their
                output rows are 0), their keys are neither seen nor written. None: all count.

        Raises:
            AttentionBatchError: ``causal`` differs between requests (deciding on it would mean
                reading it back), or ``num_rejected`` does not fit the batch.
        """
        batch.validate_in_debug()  # not its width: unused tokens of a step may lie past the row
        if not isinstance(batch.causal, bool):
            raise AttentionBatchError("causal", "one value per request", "one bool for the step")
        rows = batch.num_reqs
        starts = repair_starts(batch.query_start_loc[: rows + 1], batch.num_tokens)
        seq_lens, used, slots = batch.seq_lens[:rows], None, batch.slot_mapping.clone()
        if num_rejected is not None:
            check_rejected(num_rejected, batch)
            seq_lens = seq_lens - num_rejected
            used = accepted_query_lens(starts, num_rejected)
            slots[: batch.num_tokens] = accepted_slots(slots[: batch.num_tokens], starts, used)
        room = batch.block_table.shape[1] * self.block_size
        return AscendFlashAttentionMetadata(
            num_reqs=rows,
            num_tokens=batch.num_tokens,
            block_size=self.block_size,
            max_query_len=batch.max_query_len,
            max_seq_len=max(batch.max_seq_len, 1),
            causal=batch.causal,
            lengths=StepLengths(
                query_starts=starts, seq_lens=seq_lens.clamp(min=1, max=room), used_query_lens=used
            ),
            block_table=batch.block_table[:rows].clone(memory_format=torch.contiguous_format),
            slot_mapping=slots,
            causal_template=self.masks.template(batch.device),
            plans=self.plans,
        )

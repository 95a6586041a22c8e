"""What the draft backend computes once per step, for all layers."""

from __future__ import annotations

import attrs
import torch

from ..plan_cache import PlanCache, StepLengths


@attrs.frozen(eq=False, kw_only=True)
class AscendFlashAttentionMetadata:
    """Metadata of one draft step. Frozen, and shares no memory with the batch it was built from.

    Every length stays on the device. The counts are sizes and bounds that the host knew already.

    Attributes:
        num_reqs: Real requests.
        num_tokens: Tokens that belong to a request; output rows after them are set to zero.
        block_size: Tokens per cache block.
        max_query_len: Longest query, or a bound above it.
        max_seq_len: Most keys of a request, or a bound above it; at least 1.
        causal: Whether keys after a token's own position are hidden.
        lengths: Starts and key counts of this step; plans belong to this object.
        block_table: ``[num_reqs, max_blocks]`` int32, a copy that nobody else writes.
        slot_mapping: ``[num_token_rows]`` int64 cache slots; negative ones are never written.
        causal_template: ``[2048, 2048]`` int8 mask template, shared by all steps.
        plans: The builder's plan cache; the only part that changes after the step was built, and
            only by gaining plans.
    """

    num_reqs: int
    num_tokens: int
    block_size: int
    max_query_len: int
    max_seq_len: int
    causal: bool
    lengths: StepLengths
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal_template: torch.Tensor
    plans: PlanCache

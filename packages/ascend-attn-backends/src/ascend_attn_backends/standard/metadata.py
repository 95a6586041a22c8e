"""What the standard backend computes once per step, for all layers."""

from __future__ import annotations

import attrs
import torch

from ascend_attn_ops import StepCalls

from ..open_tokens import StepTokens
from .token_step import TokenStep


@attrs.frozen(eq=False, kw_only=True)
class AttentionLaunch(StepTokens):
    """One operator call per layer: the requests of a step that share a mask rule.

    Attributes:
        causal: Whether keys after a token's own position are hidden.
        num_tokens: Query tokens of the call.
        token_slice: Their rows in the step, when they are contiguous.
        token_indices: ``[num_tokens]`` int64 on the device, their rows when they are not.
        query_lens_cumulative: ``[num_rows]`` cumulative query lengths; the last is ``num_tokens``.
        seq_lens: ``[num_rows]`` keys of each request.
        block_table: ``[num_rows, max_blocks]`` int32, a copy that nobody else writes.
        calls: Its operator calls so far; layers of one kind are checked and planned once.
    """

    causal: bool
    query_lens_cumulative: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor
    calls: StepCalls = attrs.field(factory=StepCalls, repr=False)


@attrs.frozen(eq=False, kw_only=True)
class AscendMetadata:
    """Metadata of one step. Frozen, and shares no memory with the batch it was built from.

    Attributes:
        num_reqs: Real requests.
        num_tokens: Tokens that belong to a request; output rows after them are set to zero.
        block_size: Tokens per cache block.
        max_query_len: Longest query.
        max_seq_len: Most keys of a request.
        launches: Operator calls per layer over requests of known lengths; one, or two when
            causality differs between requests.
        slot_mapping: ``[num_token_rows]`` int64 cache slots; negative ones are never written.
        causal_template: ``[2048, 2048]`` int8 mask template, shared by all steps.
        token_step: The tokens of requests whose lengths stayed on the device; None without any.
    """

    num_reqs: int
    num_tokens: int
    block_size: int
    max_query_len: int
    max_seq_len: int
    launches: tuple[AttentionLaunch, ...]
    slot_mapping: torch.Tensor
    causal_template: torch.Tensor
    token_step: TokenStep | None = None

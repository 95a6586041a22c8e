"""What the FA3 backend computes once per step, for all layers."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(eq=False, kw_only=True)
class AscendFAMetadata:
    """Metadata of one step. Frozen, and shares no memory with the batch it was built from.

    Attributes:
        num_reqs: Real requests.
        num_tokens: Tokens that belong to a request; output rows after them are set to zero.
        block_size: Tokens per cache block.
        max_query_len: Longest query, or a bound above it.
        max_seq_len: Most keys of a request, or a bound above it.
        causal: Whether keys after a token's own position are hidden.
        query_starts: ``[num_reqs + 1]`` int32, monotone.
        seq_lens: ``[num_reqs]`` int32 keys of each request, this step's tokens included.
        block_table: ``[num_reqs, max_blocks]`` int32, a copy that nobody else writes.
        slot_mapping: ``[num_token_rows]`` int64 cache slots; negative ones are never written.
    """

    num_reqs: int
    num_tokens: int
    block_size: int
    max_query_len: int
    max_seq_len: int
    causal: bool
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

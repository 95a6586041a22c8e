"""What the compressed backend computes once per step, for all layers of one kind."""

from __future__ import annotations

import attrs
import torch

from ..paged_step import PagedStep
from .compression import DsaCompression


@attrs.frozen(eq=False, kw_only=True)
class CompressorRows:
    """One call of the compressor for all new tokens, and where its keys go.

    Its rows are the requests, and behind them single tokens that are given once more. The
    compressor keeps the state of the last tokens only; of drafts that may be rejected each token's
    state is needed, and a row of one token keeps just that. Where the request's own row keeps the
    token too, both write the same. The keys of such rows, which may read states while these are
    written, are dropped; the requests' own rows read states of earlier steps alone.

    Attributes:
        starts: ``[num_rows + 1]`` int32 first token of each row among the tokens of the call.
        first_positions: ``[num_rows]`` int32 position of each row's first token in its request.
        state_table: ``[num_rows, max_state_blocks]`` int32 blocks of the states, 0 for none.
        repeated_tokens: ``[R]`` int64 tokens that are given once more, or None without any.
        key_positions: ``[num_keys]`` int64 position of the first token of each key's group: the
            rows of the rotary table that the compressor takes. 0 where there is no key.
        key_slots: ``[num_keys]`` int64 slot of each key; -1 where there is none or it is dropped,
            and for keys whose last token has no slot either.
    """

    starts: torch.Tensor
    first_positions: torch.Tensor
    state_table: torch.Tensor
    repeated_tokens: torch.Tensor | None
    key_positions: torch.Tensor
    key_slots: torch.Tensor

    def tokens(self, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Rows of the call, ``[num_tokens + R, H]``, from the step's hidden states."""
        real = hidden[:num_tokens]
        if self.repeated_tokens is None:
            return real.contiguous()
        return torch.cat([real, real.index_select(0, self.repeated_tokens)])


@attrs.frozen(eq=False, kw_only=True)
class IndexRows:
    """A step over the index keys, for an indexer that knows no compression.

    A token may choose among ``(position + 1) // ratio`` keys. Tokens of a request whose positions
    leave the same remainder see one key more from each to the next, which is the causal mask that
    the operator has. So the step has ``ratio`` short requests in place of each.

    Attributes:
        step: The step over the index cache, tokens in the order of these requests.
        order: ``[num_tokens]`` int64 token of each row of the step.
        places: ``[num_tokens]`` int64 row of each token.
    """

    step: PagedStep
    order: torch.Tensor
    places: torch.Tensor


@attrs.frozen(eq=False, kw_only=True)
class CompressedStep:
    """The compressed side of a step.

    Attributes:
        compression: What the layers do.
        block_size: Compressed keys per block.
        block_table: ``[num_reqs, max_blocks]`` int32 blocks of compressed (and index) keys.
        key_lens: ``[num_reqs]`` int32 compressed keys of each request after this step.
        residual_lens: ``[num_reqs]`` int32 tokens behind the last of them.
        compressor: The call that makes this step's keys.
        index: The step of the indexer; None where all keys are attended to.
        mask_mode: 3: a token sees the keys whose last token is not after it; 0: all keys.
    """

    compression: DsaCompression
    block_size: int
    block_table: torch.Tensor
    key_lens: torch.Tensor
    residual_lens: torch.Tensor
    compressor: CompressorRows
    index: IndexRows | None
    mask_mode: int = 3


@attrs.frozen(eq=False, kw_only=True)
class AscendDSAMetadata(PagedStep):
    """Metadata of one step for layers of one kind; see :class:`PagedStep` for the other fields.

    Attributes:
        query_starts: ``[num_reqs + 1]`` int32 query starts, the first 0.
        window: Keys of the sliding window that a token sees, its own included.
        compressed: The compressed side; None for layers with the window alone.
        plan: ``[1024]`` int32 work split of sparse_flash_mla for these lengths; None in a step
            without tokens.
    """

    query_starts: torch.Tensor
    window: int
    compressed: CompressedStep | None
    plan: torch.Tensor | None

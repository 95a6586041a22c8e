"""A step whose key counts stay on the device: every token is a request of its own.

fused_infer_attention_score takes key counts as integers of the host, and aligns its causal mask and
its windows to them. Where the host knows bounds only (drafts whose acceptance is still on the way),
a token by itself needs no alignment: the bound is its key count, and a full mask that is made on
the device hides the keys that it may not see.
"""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..kv_layout import num_blocks_for
from ..open_tokens import OpenTokens, StepTokens
from ..token_keys import TokenKeys, token_keys

MOST_MASKED_KEYS = 1 << 26
"""Tokens times keys of a step up to which it is taken: 64 MiB of mask for each kind of window."""

LARGEST_BLOCK = 512
"""Tokens per block that the operator takes for requests of one token (op-plugin docs)."""


@attrs.frozen(eq=False)
class TokenMask:
    """What one kind of window hides.

    Attributes:
        hidden: ``[num_tokens, 1, 1, keys]`` bool. A token that sees nothing has its first key left
            open, because the operator leaves rows without any key undefined.
        keyless: ``[num_tokens, 1, 1]`` bool, the tokens that see nothing; their result is 0.
    """

    hidden: torch.Tensor
    keyless: torch.Tensor


@attrs.frozen(eq=False, kw_only=True)
class TokenStep(StepTokens):
    """Tokens as requests with one token each; see :class:`StepTokens` for its other fields.

    The keys up to a token's bound are read, the hidden ones too: the cache must hold finite numbers
    in every slot, as a cache that begins with zeros does.

    Attributes:
        keys: Which keys each token sees without a window.
        key_bounds: ``[num_tokens]`` keys of each token as the operator is told, at least 1.
        block_table: ``[num_tokens, max_blocks]`` int32; block 0 behind a token's keys.
        block_size: Tokens per cache block.
    """

    keys: TokenKeys
    key_bounds: tuple[int, ...]
    block_table: torch.Tensor
    block_size: int
    _masks: dict[int | None, TokenMask] = attrs.field(factory=dict, init=False)

    def mask(self, window: int | None) -> TokenMask:
        """The mask of a layer; layers with the same window share it.

        Args:
            window: Keys on each side that a token sees, its own included, or None for all.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> TokenMask:
        count = self.block_table.shape[1] * self.block_size
        key = torch.arange(count, device=self.block_table.device)
        own, ends = self.keys.own[:, None], self.keys.ends[:, None]
        hidden = key >= ends
        if window is not None:
            hidden = hidden | (key >= own + window) | (key <= own - window)
        keyless = hidden.all(-1, keepdim=True)
        hidden = hidden & ~(keyless & (key == 0))
        return TokenMask(hidden[:, None, None], keyless[:, None])


def token_step(batch: AttentionBatch, block_size: int, opened: OpenTokens) -> TokenStep | None:
    """The open tokens of a step. Reads no device tensor.

    Args:
        batch: The step.
        block_size: Tokens per cache block.
        opened: Its open tokens, at least one.

    Returns:
        None where masks or blocks are too large.
    """
    table = batch.block_table[: batch.num_reqs]
    columns = num_blocks_for(max(opened.bounds), block_size)
    masked = opened.num_tokens * columns * block_size
    if masked > MOST_MASKED_KEYS or block_size > LARGEST_BLOCK:
        return None
    lens = batch.seq_lens.clamp(max=table.shape[1] * block_size)
    keys = token_keys(batch, batch.query_start_loc, lens, batch.causal).of(opened)
    first = torch.arange(columns, device=table.device) * block_size
    blocks = table[:, :columns].index_select(0, keys.rows)
    return TokenStep(
        **opened.places(),
        keys=keys,
        key_bounds=_bounds_of_tokens(opened),
        block_table=torch.where(first < keys.ends[:, None], blocks, 0),
        block_size=block_size,
    )


def _bounds_of_tokens(opened: OpenTokens) -> tuple[int, ...]:
    """The bound of each token's request; that of the longest where the host has no starts."""
    if opened.query_lens is None:
        return (max(opened.bounds),) * opened.num_tokens
    pairs = zip(opened.bounds, opened.query_lens, strict=True)
    return tuple(bound for bound, count in pairs for _ in range(count))

"""The steps of a draft after a verification, from device tensors alone.

A verification leaves each request with ``seq_lens`` keys, of which the last ``num_rejected`` belong
to rejected drafts. Every later length follows from ``seq_lens - num_rejected``; a draft that keeps
counting from ``seq_lens`` sees keys that are not part of the text.
"""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import AttentionBatchError, InvalidFieldError
from ..kv_layout import PAD_SLOT


@attrs.frozen(eq=False, kw_only=True)
class DraftStep:
    """One draft step.

    Attributes:
        batch: The step's requests; lengths on the device only.
        positions: ``[num_tokens]`` int64 position of each token, for the rotary embedding; never
            past the draft's last position.
        num_unused: ``[num_reqs]`` int32, the last so many tokens of each request lie past the end;
            hand them to the builder as ``num_rejected``.
    """

    batch: AttentionBatch
    positions: torch.Tensor
    num_unused: torch.Tensor


def keep_accepted(batch: AttentionBatch, num_rejected: torch.Tensor) -> torch.Tensor:
    """The slots of a verified batch, with the pad slot for the tokens that were rejected.

    For drafts that write the target's tokens into their own cache.

    Args:
        batch: The batch that was verified.
        num_rejected: ``[num_reqs]`` int32 on the batch's device, at most the query tokens of each.

    Returns:
        ``[num_token_rows]`` int64, a new tensor.

    Raises:
        AttentionBatchError: ``num_rejected`` does not fit the batch.
    """
    check_rejected(num_rejected, batch)
    starts = batch.query_start_loc[: batch.num_reqs + 1]
    slots = batch.slot_mapping.clone()
    slots[: batch.num_tokens] = accepted_slots(
        slots[: batch.num_tokens], starts, accepted_query_lens(starts, num_rejected)
    )
    return slots


def draft_step(
    batch: AttentionBatch,
    num_rejected: torch.Tensor,
    *,
    offset: int,
    query_len: int,
    block_size: int,
    max_model_len: int,
    causal: bool = True,
) -> DraftStep:
    """The draft step that computes ``query_len`` tokens per request, ``offset`` tokens further on.

    Without rejected drafts a request ends at position ``seq_lens - 1``; its first new token has
    position ``seq_lens - num_rejected``. A drafter that makes one token per step asks for
    ``offset`` 0, 1, 2 ... with ``query_len`` 1; one that makes all k at once asks for ``offset`` 0
    with ``query_len`` k + 1.

    Tokens past ``max_model_len``, or past the block row, are unused: they keep the last position,
    so nothing is indexed past its end, and get the pad slot.

    Args:
        batch: The batch that was verified.
        num_rejected: ``[num_reqs]`` int32 on the batch's device.
        offset: Tokens that earlier draft steps have added to each request.
        query_len: Tokens per request of this step.
        block_size: Tokens per cache block.
        max_model_len: Positions that the draft has, 0 to ``max_model_len - 1``.
        causal: Whether the draft's layers hide later keys.

    Raises:
        AttentionBatchError: ``num_rejected`` does not fit the batch.
        InvalidFieldError: A count is out of range.
    """
    check_rejected(num_rejected, batch)
    _at_least("offset", offset, 0)
    _at_least("query_len", query_len, 1)
    _at_least("max_model_len", max_model_len, 1)
    rows, device = batch.num_reqs, batch.device
    table = batch.block_table[:rows].clone(memory_format=torch.contiguous_format)
    room = min(max_model_len, table.shape[1] * block_size)
    first = ((batch.seq_lens[:rows] - num_rejected).clamp(min=0) + offset).clamp(max=room)
    wanted = first[:, None].long() + torch.arange(query_len, device=device)
    positions = wanted.clamp(max=room - 1)
    seq_lens = first + query_len
    step = AttentionBatch(
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len,
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=_slots(table, positions, block_size)
        .masked_fill(wanted >= room, PAD_SLOT)
        .flatten(),
        num_reqs=rows,
        num_tokens=rows * query_len,
        max_query_len=query_len,
        max_seq_len=min(batch.max_seq_len + offset, room) + query_len,
        causal=causal,
    )
    unused = (seq_lens - room).clamp(min=0)
    return DraftStep(batch=step, positions=positions.flatten(), num_unused=unused)


def check_rejected(num_rejected: torch.Tensor, batch: AttentionBatch) -> None:
    """Check the form of ``num_rejected``; reads no value.

    Raises:
        AttentionBatchError: Shape, dtype or device do not fit the batch.
    """
    wanted = (torch.int32, (batch.num_reqs,), batch.device)
    if (num_rejected.dtype, tuple(num_rejected.shape), num_rejected.device) != wanted:
        raise AttentionBatchError(
            "num_rejected",
            f"{num_rejected.dtype} {list(num_rejected.shape)} on {num_rejected.device}",
            f"torch.int32 [{batch.num_reqs}] on {batch.device}",
        )


def accepted_query_lens(starts: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
    """``[num_reqs]`` int32 query tokens without the rejected ones, at least 0."""
    return (starts.diff() - num_rejected).clamp(min=0).int()


def accepted_slots(slots: torch.Tensor, starts: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """``[num_tokens]`` slots, with the pad slot for tokens that are not among the first ``used``.

    Args:
        slots: ``[num_tokens]`` int64.
        starts: ``[num_reqs + 1]`` int32, monotone.
        used: ``[num_reqs]`` int32, tokens of each request that count.
    """
    tokens = torch.arange(slots.shape[0], dtype=starts.dtype, device=slots.device)
    rows = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    rows = rows.clamp(max=used.shape[0] - 1)
    return slots.masked_fill(tokens - starts[rows] >= used[rows], PAD_SLOT)


def _slots(table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[num_reqs, query_len]`` int64 slot of each position."""
    blocks = table.gather(1, positions // block_size).long()
    return blocks * block_size + positions % block_size


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidFieldError(name, value, f"at least {least}")

"""The compressed side of a step from its lengths: pure functions that never read the device."""

from __future__ import annotations

from itertools import pairwise

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import AttentionBatchError, InvalidFieldError
from ..kv_layout import PAD_SLOT, num_blocks_for
from ..paged_step import PagedStep
from ..transfer import copy_to_device
from .compression import DsaCompression
from .metadata import CompressorRows, IndexRows


@attrs.frozen(eq=False, kw_only=True)
class DsaTables:
    """Blocks that each request has besides those of the window.

    Attributes:
        compressed: ``[num_rows, max_blocks]`` int32 blocks of the compressed keys, and of the index
            keys beside them. Block i holds the keys ``i * block_size`` up to
            ``(i + 1) * block_size``.
        state: ``[num_rows, max_state_blocks]`` int32 blocks of the compressor's states, by position
            of the token. 0 stands for no block: nothing is written there.
    """

    compressed: torch.Tensor
    state: torch.Tensor

    @classmethod
    def cleared(
        cls,
        num_rows: int,
        max_blocks: int,
        max_state_blocks: int,
        device: torch.device | str = "cpu",
    ) -> DsaTables:
        """Tables for warm-up and idle runs, beside :meth:`AttentionBatch.dummy`.

        Nothing is written: keys of tokens without a slot have none, and no token has a state.

        Args:
            num_rows: Requests.
            max_blocks: Columns of the table of compressed keys.
            max_state_blocks: Columns of the table of states.
            device: Where the tables live.
        """
        widths = (max_blocks, max_state_blocks)
        tables = (torch.zeros(num_rows, n, dtype=torch.int32, device=device) for n in widths)
        compressed, state = tables
        return cls(compressed=compressed, state=state)

    def check(self, batch: AttentionBatch, ratio: int, block_size: int, state_size: int) -> None:
        """Compare the tables with a batch; values on the device are not read.

        Raises:
            InvalidFieldError: A table is not int32 of rank 2 with a row for each request.
            AttentionBatchError: A request (by its host length) does not fit into its row.
        """
        widths = {"compressed": (self.compressed, block_size * ratio, ratio)}
        widths["state"] = (self.state, state_size, 1)
        for name, (table, tokens, unit) in widths.items():
            if table.dim() != 2 or table.shape[0] < batch.num_reqs or table.dtype != torch.int32:
                raise InvalidFieldError(
                    f"tables.{name}",
                    f"{str(table.dtype).removeprefix('torch.')} {list(table.shape)}",
                    f"int32 [at least {batch.num_reqs}, blocks]",
                )
            if batch.seq_lens_cpu is None or batch.num_reqs == 0:
                continue
            longest = int(batch.seq_lens_cpu[: batch.num_reqs].max())
            needed = num_blocks_for(longest // unit * unit, tokens)
            if needed > table.shape[1]:
                raise AttentionBatchError(
                    f"tables.{name}", f"{table.shape[1]} columns", f"at least {needed}"
                )


@attrs.frozen(eq=False)
class Repeated:
    """Tokens that are given to the compressor once more.

    Attributes:
        tokens: ``[R]`` int64 in host memory.
        requests: ``[R]`` int64 in host memory, the request of each.
    """

    tokens: torch.Tensor
    requests: torch.Tensor


def repeated_tokens(
    batch: AttentionBatch, compression: DsaCompression, num_spec_tokens: int
) -> Repeated | None:
    """Tokens whose state could be missing when drafts are rejected.

    Only requests with at most ``num_spec_tokens + 1`` tokens can lose some. With exact host lengths
    it is the tokens that the compressor would not keep; without host lengths, all tokens of these
    requests. A prompt of that length is treated the same, which costs time and changes nothing.

    Raises:
        AttentionBatchError: Drafts are configured and the query starts are on the device only.
    """
    if num_spec_tokens == 0:
        return None
    if batch.query_start_loc_cpu is None:
        raise AttentionBatchError(
            "query_start_loc_cpu", "None", "the host copy, where drafts may be rejected"
        )
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
    lens = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    tokens: list[int] = []
    requests: list[int] = []
    for row, (start, end) in enumerate(pairwise(starts)):
        count = end - start
        if not 1 < count <= num_spec_tokens + 1:
            continue
        if lens is not None:
            first = lens[row] - count
            count = compression.first_kept(first, lens[row]) - first
        tokens += range(start, start + count)
        requests += [row] * count
    return Repeated(torch.tensor(tokens), torch.tensor(requests)) if tokens else None


def compressor_rows(
    step: PagedStep,
    tables: DsaTables,
    compression: DsaCompression,
    block_size: int,
    repeated: Repeated | None,
) -> CompressorRows:
    """The call of the compressor for a step, on its device.

    Args:
        step: Lengths of the step.
        tables: Blocks of the compressed keys and of the states.
        compression: Of the layers.
        block_size: Compressed keys per block.
        repeated: Tokens to give once more.
    """
    ends = step.query_ends
    starts = torch.cat([torch.zeros_like(ends[:1]), ends])
    first = (step.seq_lens - starts.diff()).clamp(min=0)
    state, tokens = tables.state[: step.num_reqs].clone(), None
    if repeated is not None:
        tokens = copy_to_device(repeated.tokens, ends.device)
        rows = copy_to_device(repeated.requests, ends.device)
        first = torch.cat([first, (first[rows] + tokens - starts[rows]).int()])
        behind = step.num_tokens + 1 + torch.arange(len(tokens), device=ends.device)
        starts = torch.cat([starts, behind.to(starts.dtype)])
        state = torch.cat([state, state[rows]])
    positions, slots = _keys(
        starts, first, compression.ratio, step, tables.compressed[: step.num_reqs], block_size
    )
    return CompressorRows(
        starts=starts,
        first_positions=first,
        state_table=state,
        repeated_tokens=tokens,
        key_positions=positions,
        key_slots=slots,
    )


def _keys(
    starts: torch.Tensor,
    first: torch.Tensor,
    ratio: int,
    step: PagedStep,
    table: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position and slot of each packed key of the call's rows.

    Keys of repeated tokens, which stand behind the requests, have no slot, and neither has a key
    whose last token is not written into the window: padding, and idle runs.
    """
    rows = len(first)
    total = step.num_tokens + rows - step.num_reqs
    number = torch.arange(min(total, total // ratio + rows), device=first.device)
    before = _divided(first, ratio)
    ends = (_divided(first + starts.diff(), ratio) - before).cumsum(0)
    row = torch.searchsorted(ends, number, right=True).clamp(max=rows - 1)
    group = (before - torch.cat([torch.zeros_like(ends[:1]), ends[:-1]]))[row] + number
    last = starts[row] + (group + 1) * ratio - 1 - first[row]
    kept = step.slot_mapping[last.clamp(0, step.num_tokens - 1)] >= 0
    column = _divided(group, block_size)
    block = table[row.clamp(max=step.num_reqs - 1), column.clamp(max=table.shape[1] - 1)].long()
    slots = block * block_size + group.remainder(block_size)
    exists = number < ends[-1]
    written = exists & kept & (column < table.shape[1]) & (row < step.num_reqs)
    return (group * ratio).where(exists, 0), slots.where(written, PAD_SLOT)


def index_rows(step: PagedStep, ratio: int, table: torch.Tensor, block_size: int) -> IndexRows:
    """The step over the index keys; see :class:`IndexRows`.

    Args:
        step: Lengths of the step.
        ratio: Tokens per compressed key.
        table: ``[num_reqs, max_blocks]`` int32 blocks of the index keys.
        block_size: Index keys per block.
    """
    device = step.query_ends.device
    starts = torch.cat([torch.zeros_like(step.query_ends[:1]), step.query_ends]).long()
    last = step.seq_lens.long()[:, None]
    first = (last - starts.diff()[:, None]).clamp(min=0)
    remainder = torch.arange(ratio, device=device)
    # Tokens first .. last - 1 of a request whose position leaves each remainder, [B, ratio].
    counts = _divided(last - remainder - 1, ratio) - _divided(first - remainder - 1, ratio)
    key_lens = _divided(last - (last - 1 - remainder).remainder(ratio), ratio) * (counts > 0)
    ends = counts.flatten().cumsum(0)
    token = torch.arange(step.num_tokens, device=device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp(max=step.num_reqs - 1)
    position = first[row, 0] + token - starts[row]
    group = row * ratio + position.remainder(ratio)
    earlier = _divided(position - first[row, 0], ratio)
    places = ((ends - counts.flatten())[group] + earlier).clamp(max=step.num_tokens - 1)
    order = torch.zeros_like(places).scatter_(0, places, token)
    inner = PagedStep(
        num_reqs=step.num_reqs * ratio,
        num_tokens=step.num_tokens,
        max_query_len=step.max_query_len // ratio + 1,
        max_seq_len=step.max_seq_len // ratio,
        causal=True,
        block_size=block_size,
        kernel_block_size=block_size,
        query_ends=ends.int(),
        seq_lens=key_lens.flatten().int(),
        block_table=table.repeat_interleave(ratio, 0),
        slot_mapping=step.slot_mapping,
    )
    return IndexRows(step=inner, order=order, places=places)


def _divided(value: torch.Tensor, by: int) -> torch.Tensor:
    return torch.div(value, by, rounding_mode="floor").long()

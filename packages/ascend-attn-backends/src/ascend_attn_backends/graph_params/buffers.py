"""The memory that captured decode steps read: allocated once, written in place."""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import AttentionBatchError
from ..kv_layout import PAD_SLOT, num_blocks_for
from ..transfer import copy_into


@attrs.frozen
class CacheGroup:
    """Layers that share block tables and key counts, such as all layers with full attention.

    Attributes:
        block_size: Tokens per cache block.
        max_blocks: Columns of the block table.
    """

    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    max_blocks: int = attrs.field(validator=attrs.validators.ge(1))


@attrs.frozen(eq=False, kw_only=True)
class DecodeBuffers:
    """What a captured decode step of R requests and T = R * query_len tokens reads, for one group.

    Frozen: no attribute ever names another tensor, since a graph knows only addresses. The values
    change with every :meth:`refresh`.

    Attributes:
        group: Layout of the group's block tables.
        query_len: Tokens per request.
        query_start_loc: ``[R + 1]`` int32, ``0, query_len, 2 * query_len ...``; never changes.
        seq_lens: ``[R]`` int32 keys of each request, 0 in padding rows.
        seq_lens_cpu: ``[R]`` int32 in host memory, the same.
        block_table: ``[R, max_blocks]`` int32; padding rows, and columns that a request does not
            have, are 0.
        slot_mapping: ``[T]`` int64, the pad slot for padding tokens.
        token_block_table: ``[T, max_blocks]`` int32, the row of each token's request.
        token_context_lens: ``[T]`` int32 in host memory, keys that each token sees when keys after
            its own are hidden. Padding tokens have 1, not 0: what ``_npu_paged_attention`` makes of
            0 is not documented, and their results are never read.
    """

    group: CacheGroup
    query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    token_block_table: torch.Tensor
    token_context_lens: torch.Tensor

    @classmethod
    def allocate(
        cls, group: CacheGroup, num_tokens: int, query_len: int, device: torch.device
    ) -> DecodeBuffers:
        """Cleared buffers for ``num_tokens`` tokens; host memory is pinned beside a device."""
        rows, pinned = num_tokens // query_len, device.type not in ("cpu", "meta")

        def on_device(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def on_host(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

        table = on_device(rows, group.max_blocks)
        return cls(
            group=group,
            query_len=query_len,
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len,
            seq_lens=on_device(rows),
            seq_lens_cpu=on_host(rows),
            block_table=table,
            slot_mapping=torch.full((num_tokens,), PAD_SLOT, dtype=torch.int64, device=device),
            token_block_table=table if query_len == 1 else on_device(num_tokens, group.max_blocks),
            token_context_lens=on_host(num_tokens).fill_(1),
        )

    def first(self, num_tokens: int) -> DecodeBuffers:
        """The same memory as far as a step of ``num_tokens`` tokens reads it."""
        rows = num_tokens // self.query_len
        table = self.block_table[:rows]
        shared = self.token_block_table is self.block_table
        return attrs.evolve(
            self,
            query_start_loc=self.query_start_loc[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            seq_lens_cpu=self.seq_lens_cpu[:rows],
            block_table=table,
            slot_mapping=self.slot_mapping[:num_tokens],
            token_block_table=table if shared else self.token_block_table[:num_tokens],
            token_context_lens=self.token_context_lens[:num_tokens],
        )

    @property
    def num_rows(self) -> int:
        """Requests R that the step computes, padding included."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens T that the step computes, padding included."""
        return self.slot_mapping.shape[0]

    def host_query_ends(self) -> list[int]:
        """``[R]`` cumulative query lengths; the same for every step of this size."""
        return [self.query_len * (row + 1) for row in range(self.num_rows)]

    def host_seq_lens(self) -> list[int]:
        """``[R]`` keys of each request as they are now."""
        lens: list[int] = self.seq_lens_cpu.tolist()
        return lens

    def check(self, batch: AttentionBatch) -> None:
        """Check that the buffers can hold a decode step; writes nothing.

        Raises:
            AttentionBatchError: Too many requests, another number of tokens per request, or a
                request with more keys than a block row has slots.
        """
        rows, query_len = batch.num_reqs, self.query_len
        if rows > self.num_rows:
            raise AttentionBatchError("num_reqs", rows, f"at most {self.num_rows}, as captured")
        if batch.num_tokens != rows * query_len or batch.max_query_len > query_len:
            raise AttentionBatchError(
                "num_tokens",
                f"{batch.num_tokens} of {rows} requests, the longest {batch.max_query_len}",
                f"{query_len} per request, as captured",
            )
        keys = int(batch.host_seq_lens()[:rows].max()) if rows else 0
        needed = num_blocks_for(keys, self.group.block_size)
        width = min(batch.block_table.shape[1], self.group.max_blocks)
        if needed > width:
            raise AttentionBatchError(
                "block_table", f"{width} columns", f"at least {needed}, for {keys} keys"
            )

    def refresh(self, batch: AttentionBatch) -> None:
        """Write a decode step into the buffers, in place; what it does not fill becomes padding.

        Args:
            batch: At most R requests of exactly ``query_len`` tokens each. Its host lengths are
                used; without them the key counts are read from the device.

        Raises:
            AttentionBatchError: See :meth:`check`. Nothing is written then.
        """
        self.check(batch)
        self.fill(batch)

    def fill(self, batch: AttentionBatch) -> None:
        """:meth:`refresh` for a batch that passed :meth:`check`."""
        rows, tokens = batch.num_reqs, batch.num_tokens
        lens = batch.host_seq_lens()[:rows]
        columns = min(batch.block_table.shape[1], self.group.max_blocks)
        copy_into(self.seq_lens[:rows], batch.seq_lens[:rows])
        copy_into(self.seq_lens_cpu[:rows], lens)
        copy_into(self.block_table[:rows, :columns], batch.block_table[:rows, :columns])
        copy_into(self.slot_mapping[:tokens], batch.slot_mapping[:tokens])
        self._pad(rows, columns)
        self._spread_over_tokens(rows)

    def clear(self) -> None:
        """Make the whole step padding: an idle run computes and writes nothing of any request."""
        self._pad(0, 0)
        self._spread_over_tokens(0)

    def _pad(self, rows: int, columns: int) -> None:
        self.seq_lens[rows:].zero_()
        self.seq_lens_cpu[rows:].zero_()
        self.block_table[rows:].zero_()
        self.block_table[:rows, columns:].zero_()
        self.slot_mapping[rows * self.query_len :].fill_(PAD_SLOT)

    def _spread_over_tokens(self, rows: int) -> None:
        if self.token_block_table is not self.block_table:
            by_row = self.token_block_table.view(self.num_rows, self.query_len, -1)
            by_row.copy_(self.block_table[:, None])
        lens = self.token_context_lens.view(self.num_rows, self.query_len)
        hidden = torch.arange(self.query_len - 1, -1, -1, dtype=torch.int32)
        lens.copy_((self.seq_lens_cpu[:, None] - hidden).clamp(min=1))

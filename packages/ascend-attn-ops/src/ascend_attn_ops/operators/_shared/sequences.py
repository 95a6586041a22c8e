"""Query rows and key rows of the requests of one call, whatever the layouts are.

Used by the operators whose lengths are device tensors (the sparse attention family). Addresses
are 64-bit; caches may be strided.
"""

from __future__ import annotations

import attrs
import torch

PAGED_LAYOUTS = frozenset({"PA_BSND", "PA_BBND"})


@attrs.frozen(eq=False)
class QueryRows:
    """The T flattened query rows and the requests that they belong to.

    Attributes:
        request: (T,) int64 request of each row; any legal one for padding rows.
        position: (T,) int64 position inside the request.
        real: (T,) bool; False for padding rows.
        starts: (B,) int64 first row of each request.
        lengths: (B,) int64 number of real rows of each request.
    """

    request: torch.Tensor
    position: torch.Tensor
    real: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def from_spans(cls, starts: torch.Tensor, lengths: torch.Tensor, tokens: int) -> QueryRows:
        """From the first row and the number of rows of each request, starts non-decreasing."""
        row = torch.arange(tokens)
        request = torch.searchsorted(starts.contiguous(), row, right=True) - 1
        request = request.clamp(0, max(len(starts) - 1, 0))
        position = row - starts[request]
        real = (position >= 0) & (position < lengths[request])
        return cls(request, position, real, starts, lengths)


@attrs.frozen(eq=False)
class KeyRows:
    """Where the key rows of each request lie.

    Attributes:
        lengths: (B,) int64 number of keys.
        starts: (B,) int64 first row of each request in an unpaged tensor, flattened to rows.
        block_table: (B, M) block ids of a paged cache, or None.
        block_size: Tokens per block; 1 when not paged.
    """

    lengths: torch.Tensor
    starts: torch.Tensor
    block_table: torch.Tensor | None = None
    block_size: int = 1

    def read(
        self, store: torch.Tensor, request: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """Rows [*position.shape, D] of ``store`` at the positions of the requests.

        Args:
            store: (num_blocks, block_size, 1, D), (B, S, 1, D) or (T, 1, D), any strides.
            request: int64, broadcast against ``position``.
            position: int64 positions within the keys of the request.
        """
        if self.block_table is None:
            return _select(store, self.starts[request] + position)
        column = torch.div(position, self.block_size, rounding_mode="floor")
        block = self.block_table[request, column].long()
        return _select(store, block * self.block_size + position % self.block_size)


def _select(store: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows of a store by their number, counted as if it were contiguous.

    The store is seen as one matrix whose rows are as far apart as the tokens of a block: that is
    possible whenever a block starts a whole number of rows after the one before, and needs no copy.
    """
    size = store.shape[-1]
    if store.dim() == 3:
        flat = store[:, 0]
    else:
        blocks, per_block = store.shape[:2]
        block_stride, row_stride = store.stride()[:2]
        if row_stride <= 0 or block_stride % row_stride:
            index = torch.div(row, per_block, rounding_mode="floor")
            if bool((row < 0).any()):
                raise IndexError(f"negative row {int(row.min())} of a paged cache")
            return store[index, row % per_block, 0]
        step = block_stride // row_stride
        if step != per_block:
            row = torch.div(row, per_block, rounding_mode="floor") * step + row % per_block
        flat = store.as_strided(
            ((blocks - 1) * step + per_block, size), (row_stride, store.stride(-1))
        )
    return flat.index_select(0, row.reshape(-1)).view(*row.shape, size)


@attrs.frozen(eq=False)
class Sequences:
    """Layouts and lengths of a call in the conventions of the torch_npu V1 signatures.

    Attributes:
        layout_query: BSND or TND.
        layout_kv: BSND, TND or PA_BSND.
        query: (B, S1, N, D) or (T, N, D).
        key: (B, S2, 1, D), (T2, 1, D) or (num_blocks, block_size, 1, D).
        query_lengths: (B,) int32; TND: cumulative without a leading 0; BSND: lengths or None.
        kv_lengths: (B,) int32; TND: cumulative; BSND: lengths or None; paged: lengths.
        block_table: (B, M) int32 or None.
    """

    layout_query: str
    layout_kv: str
    query: torch.Tensor
    key: torch.Tensor
    query_lengths: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    block_table: torch.Tensor | None

    @property
    def paged(self) -> bool:
        """Whether keys are a paged cache."""
        return self.layout_kv in PAGED_LAYOUTS

    @property
    def batch(self) -> int:
        """B: the number of requests; the query layout says where it is read."""
        if self.layout_query == "BSND":
            return self.query.shape[0]
        return 0 if self.query_lengths is None else self.query_lengths.numel()

    @property
    def tokens(self) -> int:
        """T: query rows, B * S1 for BSND."""
        return self.query.shape[:-2].numel()

    @property
    def block_size(self) -> int:
        """Tokens per block of a paged cache, as its shape says."""
        return self.key.shape[1]

    def query_rows(self) -> QueryRows:
        """The rows; lengths beyond the tensor are cut, decreasing sums count as no rows."""
        if self.layout_query == "TND":
            starts, lengths = _spans(self.query_lengths, self.tokens)
            return QueryRows.from_spans(starts, lengths, self.tokens)
        longest = self.query.shape[1]
        starts = torch.arange(self.batch) * longest
        lengths = _lengths(self.query_lengths, self.batch, longest)
        return QueryRows.from_spans(starts, lengths, self.tokens)

    def key_rows(self) -> KeyRows:
        """The keys; lengths beyond an unpaged tensor are cut."""
        if self.paged:
            assert self.kv_lengths is not None  # noqa: S101 - the contract guarantees it
            lengths = self.kv_lengths.long().clamp(min=0)
            starts = torch.zeros_like(lengths)
            return KeyRows(lengths, starts, self.block_table, self.block_size)
        if self.layout_kv == "TND":
            starts, lengths = _spans(self.kv_lengths, self.key.shape[0])
            return KeyRows(lengths, starts)
        longest = self.key.shape[1]
        starts = torch.arange(self.batch) * longest
        return KeyRows(_lengths(self.kv_lengths, self.batch, longest), starts)


def _spans(ends: torch.Tensor | None, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and lengths of cumulative lengths, made monotone and kept inside the tensor."""
    assert ends is not None  # noqa: S101 - the contract guarantees it
    ends = ends.long().clamp(0, rows).cummax(0).values
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return starts, ends - starts


def _lengths(lengths: torch.Tensor | None, batch: int, longest: int) -> torch.Tensor:
    if lengths is None:
        return torch.full((batch,), longest, dtype=torch.long)
    return lengths.long().clamp(0, longest)


def visible_keys(rows: QueryRows, keys: KeyRows, *, causal: bool) -> torch.Tensor:
    """(T,) int64 number of keys that each row may see: the first ones of its request.

    Causal is aligned bottom right: row i of Lq sees ``Lkv - Lq + i + 1`` keys. Padding rows see
    none.
    """
    seen = keys.lengths[rows.request]
    if causal:
        seen = seen - rows.lengths[rows.request] + rows.position + 1
    return seen.clamp(min=0).masked_fill(~rows.real, 0)

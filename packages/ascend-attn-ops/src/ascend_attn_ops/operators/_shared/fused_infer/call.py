"""Both versions of the operator in one vocabulary (that of v1), with the shapes by layout."""

from __future__ import annotations

from functools import cached_property

import attrs
import torch

IntList = tuple[int, ...]
Keys = torch.Tensor | tuple[torch.Tensor, ...]
TEMPLATE_MODES = (2, 3, 4)
TREE_MODE = 9
NZ_BYTES = 32


@attrs.frozen
class QueryShape:
    """Named sizes of the query.

    Attributes:
        batch: B: requests.
        length: S, or T for the T layouts.
        heads: N.
        size: D.
    """

    batch: int
    length: int
    heads: int
    size: int


@attrs.frozen
class KeyShape:
    """Named sizes of keys or values, of whichever form.

    Attributes:
        form: ``rows`` (layout of the query), ``BnBsH``, ``BnNBsD`` or ``NZ``.
        batch: B, 1 for the T layouts, or the number of blocks.
        length: S, T, or the tokens of a block.
        heads: KN.
        size: Head size, or None where the width is no multiple of KN.
    """

    form: str
    batch: int
    length: int
    heads: int
    size: int | None


@attrs.frozen(eq=False, slots=False, kw_only=True)
class Call:
    """One call of either version; names as in v1 unless noted.

    Attributes:
        sink: ``learnable_sink`` of v2.
        prefix: key_shared_prefix, value_shared_prefix of v1.
        padding: query_padding_size, kv_padding_size of v1.
        out_scale: quant_scale2 of v1, quant_scale_out of v2; ``out_offset`` its offset.
        key_scale: key_antiquant_scale of v1, dequant_scale_key of v2; ``value_scale`` likewise.
        pair_scale: antiquant_scale of v1, one tensor for keys and values.
        query_scale: dequant_scale_query of v2.
        other_quant: Names of further quantisation tensors that are given.
    """

    query: torch.Tensor
    key: Keys
    value: Keys
    pse: torch.Tensor | None
    mask: torch.Tensor | None
    q_lens: IntList | None
    kv_lens: IntList | None
    block_table: torch.Tensor | None
    query_rope: torch.Tensor | None
    key_rope: torch.Tensor | None
    sink: torch.Tensor | None = None
    prefix: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    prefix_lens: IntList | None = None
    padding: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    out_scale: torch.Tensor | None
    out_offset: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    pair_scale: torch.Tensor | None = None
    query_scale: torch.Tensor | None = None
    other_quant: tuple[str, ...] = ()
    heads: int
    kv_heads_given: int
    scale: float
    pre: int
    nxt: int
    layout: str
    mode: int
    inner_precise: int
    block_size: int
    key_mode: int
    value_mode: int
    query_mode: int = 0
    lse: bool
    out: tuple[torch.Tensor, ...] | None

    @property
    def kv_heads(self) -> int:
        """KN: the number of key and value heads."""
        return self.kv_heads_given or self.heads

    @property
    def base(self) -> str:
        """Layout of the query: BSH, BSND, BNSD, TND or NTD."""
        return self.layout.partition("_")[0]

    @property
    def target(self) -> str:
        """Layout of the output: BSH, BSND, BNSD, NBSD, TND or NTD."""
        return self.layout.rpartition("_")[2]

    @property
    def packed(self) -> bool:
        """Whether requests follow each other on one token axis (T layouts)."""
        return "T" in self.base

    @property
    def paged(self) -> bool:
        """Whether keys and values are a paged cache."""
        return self.block_table is not None

    @property
    def rope(self) -> bool:
        """Whether rotary parts are given (multi-head latent attention)."""
        return self.query_rope is not None

    @property
    def prefixed(self) -> bool:
        """Whether every request begins with shared prefix keys."""
        return self.prefix[0] is not None

    @property
    def int8_keys(self) -> bool:
        """Whether keys are quantised (int8, or int4 packed in int32)."""
        quantised = self.first_key.dtype in (torch.int8, torch.int32)
        return quantised and self.first_key.dtype != self.query.dtype

    @property
    def first_key(self) -> torch.Tensor:
        """The key tensor, or the first of a list."""
        return self.key if isinstance(self.key, torch.Tensor) else self.key[0]

    @property
    def first_value(self) -> torch.Tensor:
        """The value tensor, or the first of a list."""
        return self.value if isinstance(self.value, torch.Tensor) else self.value[0]

    @cached_property
    def q(self) -> QueryShape:
        """Sizes of the query; its rank and width fit the layout."""
        size = dict(zip(self.base, self.query.shape, strict=True))
        wide = "H" in size
        return QueryShape(
            batch=len(self.q_lens or ()) if self.packed else size["B"],
            length=size["T"] if self.packed else size["S"],
            heads=self.heads if wide else size["N"],
            size=size["H"] // self.heads if wide else size["D"],
        )

    @cached_property
    def k(self) -> KeyShape:
        """Sizes of the (first) key."""
        return self.key_shape(self.first_key)

    @cached_property
    def v(self) -> KeyShape:
        """Sizes of the (first) value."""
        return self.key_shape(self.first_value)

    @property
    def value_size(self) -> int:
        """VD: head size of values and output; an oddly wide value leaves that of the query."""
        size = self.v.size
        return self.q.size if size is None else size

    def key_shape(self, tensor: torch.Tensor) -> KeyShape:
        """Sizes of a tensor of keys or values; its rank fits."""
        shape = tuple(tensor.shape)
        if self.paged:
            return _paged_shape(shape, self.kv_heads)
        size = dict(zip(self.base, shape, strict=True))
        width = _divided(size["H"], self.kv_heads) if "H" in size else size["D"]
        length = size["T"] if self.packed else size["S"]
        return KeyShape("rows", size.get("B", 1), length, size.get("N", self.kv_heads), width)

    @property
    def no_keys(self) -> bool:
        """Whether the key tensor is empty: the output is then zero without further checks."""
        return isinstance(self.key, torch.Tensor) and self.key.numel() == 0

    @property
    def single(self) -> bool:
        """Whether every request has one query row by its shape (Q_S = 1; never for T layouts)."""
        return not self.packed and self.q.length == 1

    @property
    def capacity(self) -> int:
        """Largest number of keys a request can have, shared prefix included."""
        prefix = self.key_shape(self.prefix[0]).length if self.prefix[0] is not None else 0
        if self.block_table is not None:
            return self.block_table.shape[-1] * self.block_size + prefix
        if not isinstance(self.key, torch.Tensor):
            return max(self.key_shape(entry).length for entry in self.key) + prefix
        return self.k.length + prefix

    def template_shaped(self, size: int = 2048) -> bool:
        """Whether the mask has the shape of the causal template."""
        legal = ((size, size), (1, size, size), (1, 1, size, size))
        return self.mask is not None and tuple(self.mask.shape) in legal

    @property
    def effective_mode(self) -> int:
        """sparse_mode, or 1 where Q_S = 1 makes CANN read a full mask whatever the mode."""
        ignored = self.mode in TEMPLATE_MODES and self.single and not self.rope
        return 1 if ignored and not self.template_shaped() else self.mode

    def lengths(self, values: IntList | None, default: int) -> list[int]:
        """Per-request lengths of a layout with a batch axis: none, one for all, or one each."""
        if not values:
            return [default] * self.q.batch
        return [values[0]] * self.q.batch if len(values) == 1 else list(values[: self.q.batch])


def _divided(width: int, heads: int) -> int | None:
    return width // heads if width % heads == 0 else None


def _paged_shape(shape: tuple[int, ...], heads: int) -> KeyShape:
    if len(shape) == 3:
        return KeyShape("BnBsH", shape[0], shape[1], heads, _divided(shape[2], heads))
    if len(shape) == 4:
        return KeyShape("BnNBsD", shape[0], shape[2], shape[1], shape[3])
    return KeyShape("NZ", shape[0], shape[3], shape[1], shape[2] * shape[4])

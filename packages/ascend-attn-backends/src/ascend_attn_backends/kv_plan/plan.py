"""The caches of a DeepSeek-V4 model as one record."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import attrs
import torch

from ..dsa import DsaCompression
from ..dsa.compression import INDEX_SIZE, KEY_SIZE, WINDOW
from ..mla import cache_bytes_per_token
from .groups import DsaCacheGroup
from .text import plan_data, plan_text

_COUNT = attrs.validators.ge(1)


def _as_tuple(layers: Iterable[DsaCompression | None]) -> tuple[DsaCompression | None, ...]:
    return tuple(layers)


@attrs.frozen(kw_only=True)
class DsaModelShape:
    """What a plan needs to know of a model.

    Attributes:
        layers: Compression of each layer; None where there is the sliding window alone.
        num_heads: Query heads.
        window: Keys of the sliding window.
        key_size: Elements of a key; products take 512.
        index_heads: Heads of the indexers.
        index_size: Elements of an index key; products take 128.
        dtype: dtype of keys and index keys.
    """

    layers: tuple[DsaCompression | None, ...] = attrs.field(converter=_as_tuple)
    num_heads: int = attrs.field(validator=_COUNT)
    window: int = attrs.field(default=WINDOW, validator=_COUNT)
    key_size: int = attrs.field(default=KEY_SIZE, validator=_COUNT)
    index_heads: int = attrs.field(default=64, validator=_COUNT)
    index_size: int = attrs.field(default=INDEX_SIZE, validator=_COUNT)
    dtype: torch.dtype = torch.bfloat16


@attrs.frozen(kw_only=True)
class DsaKvPlanOptions:
    """How the caches are cut into blocks, and what steps look like.

    Attributes:
        block_size: Tokens per block of the window's cache.
        block_tokens: Tokens that a block of compressed keys stands for, where that makes 16 keys or
            more; with a higher ratio a block has 16 keys.
        state_block_size: Tokens per block of the compressors' states.
        num_spec_tokens: Drafts per request that a later step may take back.
        max_step_tokens: Most tokens of one request in one step (chunk of a prefill).
    """

    block_size: int = 128
    block_tokens: int = 512
    state_block_size: int = 16
    num_spec_tokens: int = 0
    max_step_tokens: int = 8192


@attrs.frozen(kw_only=True)
class RequestBytes:
    """Bytes of one request in all layers, blocks counted whole.

    Attributes:
        dsa: With this plan.
        uncompressed: One shared key for every token.
        mla: Latent attention, 576 elements for every token.
        mha: Keys and values of every head for every token.
    """

    dsa: int
    uncompressed: int
    mla: int
    mha: int


@attrs.frozen(kw_only=True)
class DsaAttnKvPlan:
    """Which layers keep which caches, in which blocks, and what they take.

    :func:`get_dsa_attn_kv_plan` makes it; ``str(plan)`` is a table and :meth:`as_dict` its data.

    Attributes:
        model: The model.
        options: Blocks and steps.
        groups: The caches; each has a block table of its own, except that index keys lie beside
            the compressed keys and both states of a layer beside each other.
    """

    model: DsaModelShape
    options: DsaKvPlanOptions
    groups: tuple[DsaCacheGroup, ...]

    def group(self, name: str) -> DsaCacheGroup:
        """The group with this name, such as ``"compressed/4"``.

        Raises:
            KeyError: There is none.
        """
        return {group.name: group for group in self.groups}[name]

    def groups_of(self, layer: int) -> tuple[DsaCacheGroup, ...]:
        """The caches that a layer keeps."""
        return tuple(group for group in self.groups if layer in group.layers)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes by which a long request grows with each token, in all layers."""
        parts = (
            Fraction(group.row_bytes * len(group.layers), group.tokens_per_row)
            for group in self.groups
            if group.grows
        )
        return sum(parts, Fraction(0))

    def request_blocks(self, length: int, step_tokens: int | None = None) -> dict[str, int]:
        """Most blocks that a request takes in each group, per layer.

        Args:
            length: Tokens of the request, prompt and output.
            step_tokens: Most tokens of a step; None for decoding with the plan's drafts.
        """
        tokens = self.options.num_spec_tokens + 1 if step_tokens is None else step_tokens
        return {group.name: group.max_blocks(length, tokens) for group in self.groups}

    def request_bytes(self, length: int, step_tokens: int | None = None) -> int:
        """Bytes of :meth:`request_blocks` in all layers."""
        blocks = self.request_blocks(length, step_tokens)
        return sum(
            blocks[group.name] * group.block_bytes * len(group.layers) for group in self.groups
        )

    def pool_blocks(self, num_requests: int, length: int, step_tokens: int) -> dict[str, int]:
        """Blocks per layer of pools that hold so many requests at their peak, null blocks too."""
        blocks = self.request_blocks(length, step_tokens)
        return {g.name: num_requests * blocks[g.name] + g.null_blocks for g in self.groups}

    def compare(self, length: int) -> RequestBytes:
        """A decoding request of ``length`` tokens under this plan and three other architectures."""
        model, size = self.model, self.options.block_size
        tokens = -(-length // size) * size * len(model.layers)
        other = cache_bytes_per_token(model.num_heads, model.num_heads, model.key_size, model.dtype)
        return RequestBytes(
            dsa=self.request_bytes(length),
            uncompressed=tokens * model.key_size * model.dtype.itemsize,
            mla=tokens * other.mla,
            mha=tokens * other.mha,
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data that ``json.dumps`` takes."""
        return plan_data(self)

    def __str__(self) -> str:
        return plan_text(self)

"""How a DeepSeek-V4 layer compresses its keys, and what that asks of its caches."""

from __future__ import annotations

import attrs

INDEX_SIZE, ROPE_SIZE, KEY_SIZE, WINDOW = 128, 64, 512, 128
"""Elements of an index key, of the rotated tail of a key and of a key; keys of the sliding window
(ops-transformer docs sparse_flash_mla, compressor; transformers DeepseekV4Config)."""


@attrs.frozen
class DsaCompression:
    """One key for every ``ratio`` tokens; layers that choose among these keys overlap their groups.

    The kinds of layers of DeepSeek-V4 (transformers DeepseekV4Config.layer_types):
    ``compressed_sparse_attention`` is ``DsaCompression(4, top_k=512)``,
    ``heavily_compressed_attention`` is ``DsaCompression(128)``, and ``sliding_attention`` has None
    instead of this record.

    Attributes:
        ratio: Tokens per compressed key c.
        top_k: Compressed keys that an indexer chooses for each token; None attends to all.

    Raises:
        ValueError: A count is too small; names the field.
    """

    ratio: int = attrs.field(validator=attrs.validators.ge(2))
    top_k: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )

    @property
    def overlap(self) -> bool:
        """Whether a key is made from the tokens of its own group and of the group before."""
        return self.top_k is not None

    @property
    def coff(self) -> int:
        """Channels per element of a key that a token leaves in the state: 2 with overlap."""
        return 2 if self.overlap else 1

    def first_needed(self, length: int) -> int:
        """Position of the first token whose state is still needed behind ``length`` tokens.

        These are the tokens of the unfinished group and, with overlap, of the group before it.
        """
        return max((length // self.ratio - (self.coff - 1)) * self.ratio, 0)

    def first_kept(self, start: int, end: int) -> int:
        """Position from which on the compressor keeps the tokens ``start`` up to ``end``."""
        return max(self.first_needed(end), start)

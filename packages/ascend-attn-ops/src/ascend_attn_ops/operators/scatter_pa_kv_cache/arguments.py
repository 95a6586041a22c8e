"""Argument record of scatter_pa_kv_cache."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record, mutated


@arguments_record
class ScatterPaKvCacheArguments:
    """Write new keys and values into the paged KV cache, in place.

    For token ``t`` with ``slot = slot_mapping[t]``: ``block = slot // block_size``,
    ``offset = slot % block_size``. ``Norm``: ``key_cache[block, offset] = key[t]``. ``PA_NZ``:
    row ``t`` is cut into pieces of ``L = 32 / itemsize`` elements and piece ``c`` goes to
    ``key_cache[block, c, offset]``. A negative slot is skipped (vendor golden; the documents
    promise only slots in range). Repeated slots: the winner is undefined.

    Attributes:
        key: (T, N, Dk) new keys, or (B, S, N, Dk) in the compressing scenario.
        value: (T, N, Dv) or (B, S, N, Dv).
        key_cache: Norm (num_blocks, block_size, N, Dk); PA_NZ (num_blocks, N*Dk/L, block_size, L).
        value_cache: Same with Dv.
        slot_mapping: (T,) int32 or int64; (B, N) in the compressing scenario.
        compress_lens: (B, N) tokens removed per head; compressing scenario only.
        compress_seq_offsets: (B*N,) start of the compressed part.
        seq_lens: (B,) tokens per request.
        cache_mode: ``"PA_NZ"`` (default of the schema) or ``"Norm"``.

    Source: op-plugin documents of npu_scatter_pa_kv_cache; torch_npu 2.13 schema.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor = mutated()
    value_cache: torch.Tensor = mutated()
    slot_mapping: torch.Tensor = attrs.field()
    compress_lens: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    compress_seq_offsets: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seq_lens: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cache_mode: str | None = attrs.field(default="PA_NZ", kw_only=True)

    @property
    def is_nz(self) -> bool:
        """Whether the caches are in FRACTAL_NZ order."""
        return self.cache_mode == "PA_NZ"

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""
        return self.key_cache.shape[2 if self.is_nz else 1]

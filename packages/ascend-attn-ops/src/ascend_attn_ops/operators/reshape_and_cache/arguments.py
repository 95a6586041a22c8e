"""Argument record of reshape_and_cache."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record, mutated
from ..scatter_pa_kv_cache.arguments import ScatterPaKvCacheArguments


@arguments_record
class ReshapeAndCacheArguments:
    """Write new keys and values into the paged KV cache, in place: the older ATB form.

    The same writes as scatter_pa_kv_cache: ``block, offset = divmod(slot, block_size)`` and
    ``key_cache[block, offset] = key[t]``; with NZ caches row ``t`` is cut into pieces of
    ``L = 32 / itemsize`` elements, piece ``c`` going to ``key_cache[block, c, offset]``. Negative
    slots are skipped, as there (decision). Which of the two forms the caches have is read from
    their shape; 310P takes NZ caches, the other products plain ones.

    Attributes:
        key: (T, N, Dk) new keys.
        value: (T, N, Dv).
        key_cache: (num_blocks, block_size, N, Dk), or NZ (num_blocks, N*Dk/L, block_size, L).
        value_cache: Same with Dv.
        slot_indices: (T,) int32.

    Source: torch_npu 2.13 operator atb::_npu_reshape_and_cache; vllm-ascend device_op.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor = mutated()
    value_cache: torch.Tensor = mutated()
    slot_indices: torch.Tensor = attrs.field()

    @property
    def is_nd(self) -> bool:
        """Whether both caches have the plain (num_blocks, block_size, N, D) shape."""
        pairs = ((self.key_cache, self.key), (self.value_cache, self.value))
        return all(cache.shape[2:] == rows.shape[1:] for cache, rows in pairs)

    def as_scatter(self) -> ScatterPaKvCacheArguments:
        """The scatter_pa_kv_cache call that writes the same."""
        return ScatterPaKvCacheArguments(
            self.key,
            self.value,
            self.key_cache,
            self.value_cache,
            self.slot_indices,
            cache_mode="Norm" if self.is_nd else "PA_NZ",
        )

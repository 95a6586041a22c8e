"""Writing the cache by one compiled loop instead of several calls of torch."""

from __future__ import annotations

from array import array

import attrs
import torch

from .._shared.compiled import Kernel, compiled_loop
from .arguments import ScatterPaKvCacheArguments as Args

PLAN = (
    "heads", "row_bytes", "row_token", "row_head",
    "block_size", "cache_block", "cache_token", "cache_head",
)  # fmt: skip
"""Numbers of the keys, then of the values; the number of tokens and of slots stand before them.

Steps are in bytes. The loop reads them in this order.
"""


def writes(a: Args) -> bool:
    """Whether calls of this kind are written here."""
    tensors = (a.key, a.value, a.key_cache, a.value_cache)
    return (
        not a.is_nz
        and a.slot_mapping.dtype == torch.int64
        and a.slot_mapping.is_contiguous()
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and _loop() is not None
    )


@attrs.frozen(eq=False)
class CompiledWrite:
    """Writes tokens into caches whose shapes, strides and dtypes are those of one call.

    Attributes:
        slots: Slots of the caches.
    """

    slots: int
    _loop: Kernel
    _plan: array[int]

    @classmethod
    def of(cls, a: Args) -> CompiledWrite:
        """For calls like this one, which :func:`writes` takes."""
        loop = _loop()
        assert loop is not None  # noqa: S101 - `writes` said so
        slots = a.key_cache.shape[0] * a.block_size
        numbers = [a.key.shape[0], slots, *_steps(a.key, a.key_cache)]
        plan = array("q", [*numbers, *_steps(a.value, a.value_cache)])
        return cls(slots, loop, plan)

    def run(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values; shapes as in the argument record.

        Raises:
            IndexError: A slot is not in the cache; nothing is written.
        """
        wrong = self._loop(
            key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            slot_mapping.data_ptr(), self._plan.buffer_info()[0],
        )  # fmt: skip
        if wrong >= 0:
            found = int(slot_mapping[wrong])
            raise IndexError(f"slot_mapping[{wrong}]: found {found}, allowed: below {self.slots}")


def _steps(rows: torch.Tensor, blocks: torch.Tensor) -> list[int]:
    item = rows.itemsize
    block, token, head = (step * item for step in blocks.stride()[:3])
    row_token, row_head = (step * item for step in rows.stride()[:2])
    sizes = rows.shape[1], rows.shape[2] * item
    return [*sizes, row_token, row_head, blocks.shape[1], block, token, head]


@compiled_loop
def _loop() -> Kernel:
    from .write_kernel import WRITE

    return WRITE

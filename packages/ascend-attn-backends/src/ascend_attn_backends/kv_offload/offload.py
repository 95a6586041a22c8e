"""Sparse latent attention over keys that live in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType

import attrs
import torch

from ..errors import InvalidFieldError
from ..indexer import IndexGroup
from ..paged_step import PagedStep, check_shape, write_rows
from ..sfa import AscendSFAImpl
from .pool import BlockPlaces
from .selected import pieces_within, selected_blocks
from .store import HostKvStore


@attrs.frozen
class OffloadCounters:
    """What the pool has done so far, in fetch blocks.

    Attributes:
        hits: Blocks that were in the pool when a layer needed them.
        misses: Blocks that a layer had to wait for.
        prefetched: Blocks that were copied ahead.
        prefetch_hits: Hits that the pool owes to a prefetch; each prefetched block counts once.
        evictions: Blocks that made room.
        bytes_fetched: Bytes copied from the host, prefetches included.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0
    evictions: int = 0
    bytes_fetched: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits as a part of all needed blocks; 0 before the first one."""
        needed = self.hits + self.misses
        return self.hits / needed if needed else 0.0


class SelectedKvOffload:
    """Keys of all layers in host memory; a pool of fixed size holds the blocks in use.

    A layer needs the blocks that its tokens chose keys from. They are copied as a set before it
    attends; meanwhile the set of the next layer is copied by a second thread: exactly the same
    blocks if the next layer shares the choice, else the blocks that it used in the step before,
    which is a guess. A step whose tokens need more blocks than the pool holds is computed in
    pieces. Knowing the blocks on the host costs one read of the choice per layer; that is the price
    of this feature, and the only place of the sparse backend where the device is read.

    Not thread-safe: one thread calls, the second one only copies bytes into pinned places.

    Args:
        store: The keys.
        capacity_blocks: Fetch blocks that the pool holds, of all layers together.
        groups: Which layers share a choice; see :func:`ascend_attn_backends.index_groups`.
        device: Where the pool lives. Only ``"cpu"`` in this version: copies by a second thread and
            kernels of a device's stream are not ordered against each other yet.

    Raises:
        InvalidFieldError: Another device, no places, or groups that do not cover the layers once.
    """

    def __init__(
        self,
        store: HostKvStore,
        capacity_blocks: int,
        groups: Sequence[IndexGroup],
        device: torch.device | str = "cpu",
    ) -> None:
        if torch.device(device).type != "cpu":
            raise InvalidFieldError("device", device, "cpu, the only one of this version")
        layers = sorted(layer for group in groups for layer in group.layers)
        if layers != list(range(store.num_layers)):
            raise InvalidFieldError("groups", layers, f"every layer 0 to {store.num_layers - 1}")
        self.store = store
        self._places = BlockPlaces(store.num_layers, store.num_blocks, capacity_blocks)
        self.pool = (_pages(store.latent, capacity_blocks), _pages(store.rope, capacity_blocks))
        self._group_of = {layer: group for group in groups for layer in group.layers}
        self._fresh = torch.zeros(capacity_blocks, dtype=torch.bool)
        self._pending: dict[int, tuple[Future[None], torch.Tensor]] = {}
        self._last_used: dict[int, torch.Tensor] = {}
        self._counters = OffloadCounters()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kv-offload")

    def __enter__(self) -> SelectedKvOffload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the copies under way and end the second thread."""
        self._copier.shutdown(wait=True)

    @property
    def counters(self) -> OffloadCounters:
        """Counts since the start."""
        return attrs.evolve(self._counters, evictions=self._places.evictions)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool; they never grow."""
        return self._places.capacity * self.store.bytes_per_block

    def resident(self, layer: int) -> dict[int, int]:
        """Place in the pool of each block of a layer that is there or on its way."""
        blocks = torch.arange(self.store.num_blocks)
        slots = self._places.slots(layer, blocks)
        return dict(zip(blocks[slots >= 0].tolist(), slots[slots >= 0].tolist(), strict=True))

    def write_kv(
        self, layer: int, latent: torch.Tensor, rope: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write this step's rows of a layer into the store, and into the pool where it has them.

        Args:
            layer: Whose rows.
            latent: ``[T, 512]``, T at least ``num_token_rows``.
            rope: ``[T, 64]``.
            slot_mapping: ``[num_token_rows]`` int64 slots of the cache manager; negative ones are
                skipped.

        Raises:
            InvalidFieldError: Fewer rows than slots.
        """
        self._finish(layer)
        slots, size = slot_mapping.cpu(), self.store.block_size
        self.store.write(layer, latent.cpu(), rope.cpu(), slots)
        place = self._places.slots(layer, torch.div(slots, size, rounding_mode="floor").clamp(0))
        copies = torch.where((slots >= 0) & (place >= 0), place * size + slots % size, -1)
        write_rows(("latent", latent, self.pool[0]), ("rope", rope, self.pool[1]), copies)

    def forward(
        self,
        impl: AscendSFAImpl,
        layer: int,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        topk_indices: torch.Tensor,
        metadata: PagedStep,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """As :meth:`AscendSFAImpl.forward`, with the keys of ``layer`` from the store.

        Args:
            impl: The layer's attention.
            layer: Its number.
            query_latent: ``[num_token_rows, N, 512]``.
            query_rope: ``[num_token_rows, N, 64]``.
            topk_indices: ``[T or more, 1, k]`` int32.
            metadata: Built with ``kernel_block_size`` equal to the store's fetch block.
            output: ``[num_token_rows, N, 512]``, written in place.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape or the metadata's block does not fit.
            OffloadCapacityError: One token needs more blocks than the pool holds.
        """
        size = self.store.block_size
        if metadata.kernel_block_size != size:
            raise InvalidFieldError("kernel_block_size", metadata.kernel_block_size, str(size))
        rows = metadata.num_tokens
        check_shape("topk_indices", topk_indices, rows, 1, None)
        check_shape("output", output, rows, impl.num_heads, impl.latent_size)
        blocks = selected_blocks(topk_indices[:rows, 0], metadata)
        for first, last, needed in pieces_within(blocks, self._places.capacity):
            with self._resident(layer, needed) as table_of:
                if last == rows:
                    self._prefetch_next(layer, blocks)
                step = metadata.narrowed(first, last)
                impl.forward(
                    query_latent[first:last],
                    query_rope[first:last],
                    *self.pool,
                    topk_indices[first:last],
                    attrs.evolve(step, block_table=table_of[step.block_table], block_size=size),
                    output[first:last],
                )
        output[rows:].zero_()
        return output

    def prefetch(self, layer: int, blocks: torch.Tensor) -> None:
        """Copy blocks of a layer ahead, as far as places are free.

        Args:
            layer: Whose blocks.
            blocks: ``[n]`` int64 fetch blocks, different ones.

        Raises:
            InvalidFieldError: No such layer.
        """
        if layer not in self._group_of:
            raise InvalidFieldError("layer", layer, f"0 to {self.store.num_layers - 1}")
        self._finish(layer)
        slots = self._places.slots(layer, blocks)
        here = slots[slots >= 0]
        self._places.touch(here)
        self._places.pin(here)
        missing = blocks[slots < 0][: self._places.num_free]
        if len(missing):
            places = self._places.place(layer, missing)
            self._fresh[places] = True
            future = self._copier.submit(self.store.copy_blocks, layer, missing, self.pool, places)
            self._pending[layer] = (future, places)
            self._count(prefetched=len(missing), bytes_fetched=self._bytes(missing))
        self._places.unpin(here)

    def _prefetch_next(self, layer: int, blocks: torch.Tensor) -> None:
        self._last_used[layer] = blocks[blocks >= 0].unique()
        following = (layer + 1) % self.store.num_layers
        if following == layer:
            return
        shared = following in self._group_of[layer].layers and following > layer
        guess = self._last_used[layer] if shared else self._last_used.get(following)
        if guess is not None:
            self.prefetch(following, guess)

    @contextmanager
    def _resident(self, layer: int, blocks: torch.Tensor) -> Iterator[torch.Tensor]:
        """Keep blocks of a layer in the pool; yields ``[num_blocks]`` int32 block to place.

        Blocks that are not needed map to place 0: no chosen key lies there.
        """
        slots = self._fetched(layer, blocks)
        try:
            table = torch.zeros(self.store.num_blocks, dtype=torch.int32)
            table[blocks] = slots.int()
            yield table
        finally:
            self._places.unpin(slots)

    def _fetched(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Places of the blocks, pinned once, after copying what is missing."""
        self._finish(layer)
        slots = self._places.slots(layer, blocks)
        here, missing = slots[slots >= 0], blocks[slots < 0]
        self._places.touch(here)
        self._places.pin(here)
        self._count(hits=len(here), misses=len(missing), prefetch_hits=int(self._fresh[here].sum()))
        self._fresh[here] = False
        try:
            self._bring(layer, missing)
        except BaseException:
            self._places.unpin(here)
            raise
        return self._places.slots(layer, blocks)

    def _bring(self, layer: int, missing: torch.Tensor) -> None:
        """Copy blocks into the pool now; their places are pinned once."""
        if not len(missing):
            return
        if len(missing) > self._places.num_free:
            for other in list(self._pending):
                self._finish(other)
        places = self._places.place(layer, missing)
        self._fresh[places] = False
        try:
            self.store.copy_blocks(layer, missing, self.pool, places)
        except BaseException:
            self._places.forget(places)
            raise
        self._count(bytes_fetched=self._bytes(missing))

    def _finish(self, layer: int) -> None:
        """Wait for the copies that are under way for a layer."""
        if layer not in self._pending:
            return
        future, places = self._pending.pop(layer)
        try:
            future.result()
        except BaseException:
            self._places.forget(places)
            raise
        self._places.unpin(places)

    def _bytes(self, blocks: torch.Tensor) -> int:
        return len(blocks) * self.store.bytes_per_block

    def _count(self, **more: int) -> None:
        changes = {name: getattr(self._counters, name) + value for name, value in more.items()}
        self._counters = attrs.evolve(self._counters, **changes)


def _pages(kind: torch.Tensor, capacity: int) -> torch.Tensor:
    return torch.zeros((capacity, *kind.shape[2:]), dtype=kind.dtype)

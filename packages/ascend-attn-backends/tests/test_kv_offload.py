"""Keys in host memory: the same numbers and bytes as keys in the cache, in bounded memory."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendSFAImpl,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    HostKvStore,
    InvalidFieldError,
    OffloadCapacityError,
    SelectedKvOffload,
    SparseCacheShape,
    index_groups,
)

LATENT, ROPE, HEADS = 32, 8, 2  # the host providers take any size
KINDS = ["full", "shared", "full"]
GROUPS = index_groups(KINDS)


def shape(num_blocks: int, block_size: int) -> SparseCacheShape:
    return SparseCacheShape(
        num_blocks=num_blocks, block_size=block_size, latent_size=LATENT, rope_size=ROPE
    )


def impl() -> AscendSFAImpl:
    return AscendSFAImpl(HEADS, 0.2, LATENT, ROPE)


@attrs.define(eq=False, slots=False)
class Twin:
    """The same layers twice: over caches, and over a store with a pool."""

    capacity: int
    block_size: int = 32
    fetch: int = 16
    num_blocks: int = 12
    requests: int = 2
    seed: int = 0
    store_class: type[HostKvStore] = HostKvStore

    def __attrs_post_init__(self) -> None:
        self.g = torch.Generator().manual_seed(self.seed)
        geometry = shape(self.num_blocks, self.block_size)
        self.caches = [
            (geometry.latent.allocate(torch.float32), geometry.rope.allocate(torch.float32))
            for _ in KINDS
        ]
        store = self.store_class.allocate(geometry, len(KINDS), torch.float32, self.fetch)
        self.offload = SelectedKvOffload(store, self.capacity, GROUPS)
        width = self.num_blocks // self.requests
        order = torch.randperm(self.num_blocks, generator=self.g).int()
        self.table = order[: width * self.requests].view(self.requests, width)
        self.done = [0] * self.requests
        self.largest = width * self.block_size

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.g)

    def choose(self, batch: AttentionBatch, k: int) -> torch.Tensor:
        """k different visible keys of every token, -1 behind them."""
        rows = []
        for row in range(self.requests):
            count = int(batch.query_start_loc[row + 1] - batch.query_start_loc[row])
            for i in range(count):
                visible = int(batch.seq_lens[row]) - count + i + 1
                entries = torch.randperm(visible, generator=self.g)[:k].tolist()
                rows.append(entries + [-1] * (k - len(entries)))
        return torch.tensor(rows, dtype=torch.int32).view(-1, 1, k)

    def step(self, lengths: list[int], k: int = 4, fixed: torch.Tensor | None = None) -> list[Any]:
        """(output over caches, output over the store) of every layer."""
        self.done = [d + n for d, n in zip(self.done, lengths, strict=True)]
        batch = AttentionBatch.from_lengths(
            lengths, self.done, self.block_size, block_table=self.table
        )
        metadata = AscendSFAMetadataBuilder(self.block_size, kernel_block_size=self.fetch).build(
            batch
        )
        tokens, pairs = sum(lengths), []
        for layer, kind in enumerate(KINDS):
            new = self.random(tokens, LATENT), self.random(tokens, ROPE)
            impl().write_kv(*new, *self.caches[layer], metadata.slot_mapping)
            self.offload.write_kv(layer, *new, metadata.slot_mapping)
            if kind == "full":
                chosen = self.choose(batch, k) if fixed is None else fixed
            query = self.random(tokens, HEADS, LATENT), self.random(tokens, HEADS, ROPE)
            plain = torch.full((tokens + 1, HEADS, LATENT), torch.nan)
            fetched = plain.clone()
            impl().forward(*query, *self.caches[layer], chosen, metadata, plain)
            found = self.offload.forward(impl(), layer, *query, chosen, metadata, fetched)
            assert found is fetched
            pairs.append((plain, fetched))
        return pairs

    def check_bytes(self) -> None:
        """Every byte in the store and in the pool is that of the caches."""
        store = self.offload.store
        total = 0
        for layer, caches in enumerate(self.caches):
            resident = self.offload.resident(layer)
            total += len(resident)
            for cache, kept, pool in zip(
                caches, (store.latent, store.rope), self.offload.pool, strict=True
            ):
                blocks = cache.transpose(1, 2).reshape(kept[layer].shape)
                assert torch.equal(blocks.view(torch.int32), kept[layer].view(torch.int32))
                for block, place in resident.items():
                    assert torch.equal(
                        pool[place].view(torch.int32), blocks[block].view(torch.int32)
                    )
        assert total <= self.capacity


@given(
    st.integers(4, 40),
    st.sampled_from([(32, 16), (32, 32), (128, 16)]),
    st.lists(st.lists(st.sampled_from([0, 1, 1, 4, 9, 20]), min_size=2, max_size=2), max_size=5),
    st.integers(0, 99),
)
def test_the_same_numbers_and_bytes(
    capacity: int, blocks: tuple[int, int], schedule: list[list[int]], seed: int
) -> None:
    twin = Twin(capacity, *blocks, seed=seed)
    with twin.offload:
        for lengths in [[17, 30], *schedule]:
            for plain, fetched in twin.step(lengths):
                torch.testing.assert_close(fetched, plain, rtol=1e-6, atol=1e-6)
                assert not fetched[-1].any()
        for layer in range(len(KINDS)):  # finish the copies under way before looking at bytes
            twin.offload.prefetch(layer, torch.zeros(0, dtype=torch.int64))
        twin.check_bytes()


def test_decode_is_bit_exact() -> None:
    twin = Twin(capacity=12)
    with twin.offload:
        twin.step([60, 45])
        for _ in range(6):
            for plain, fetched in twin.step([1, 1]):
                assert torch.equal(plain, fetched)
        counters = twin.offload.counters
    assert counters.evictions > 0
    assert counters.hits > 0
    assert counters.misses > 0


class TestCounters:
    """One request of 64 keys in 4 fetch blocks; the token chooses keys 3 and 40: blocks 0 and 2."""

    chosen = torch.tensor([[[3, 40, -1]]], dtype=torch.int32)

    def twin(self, **changes: Any) -> Twin:
        twin = Twin(capacity=12, requests=1, num_blocks=4, **changes)
        every = torch.tensor([[[-1, -1, -1]]], dtype=torch.int32).expand(63, 1, 3)
        twin.step([63], fixed=every.contiguous())
        assert twin.offload.counters.hits == twin.offload.counters.misses == 0
        return twin

    def test_first_step_misses_only_where_a_layer_chooses(self) -> None:
        twin = self.twin()
        with twin.offload:
            twin.step([1], fixed=self.chosen)
            counters = twin.offload.counters
        # Layers 0 and 2 choose and miss; layer 1 shares layer 0's choice: an exact prefetch.
        assert (counters.misses, counters.hits) == (4, 2)
        assert (counters.prefetched, counters.prefetch_hits) == (2, 2)
        assert counters.hit_rate == pytest.approx(1 / 3)
        assert counters.bytes_fetched == 6 * 16 * (LATENT + ROPE) * 4
        assert counters.evictions == 0

    def test_later_steps_hit(self) -> None:
        twin = self.twin()
        with twin.offload:
            for _ in range(3):
                twin.step([1] if twin.done == [63] else [0], fixed=self.chosen[: 64 - twin.done[0]])
            before = twin.offload.counters
            twin.step([1], fixed=self.chosen)
            counters = twin.offload.counters
        assert counters.misses == before.misses
        assert counters.hits == before.hits + 6
        assert counters.prefetch_hits == before.prefetch_hits

    def test_the_set_of_the_step_before_is_prefetched_for_the_next_layer(self) -> None:
        """Layer 2 makes its own choice; others push its blocks out, the guess brings them back."""
        twin = Twin(capacity=4, requests=1, num_blocks=4)
        with twin.offload:
            none = torch.full((63, 1, 3), -1, dtype=torch.int32)
            twin.step([63], fixed=none)
            twin.step([1], fixed=self.chosen)
            before = twin.offload.counters
            twin.step([1], fixed=self.chosen)
            counters = twin.offload.counters
        assert counters.prefetched > before.prefetched
        assert counters.misses == before.misses
        assert counters.evictions > before.evictions


def test_a_step_that_needs_too_many_blocks_is_computed_in_pieces() -> None:
    twin = Twin(capacity=4)
    with twin.offload:
        for plain, fetched in twin.step([60, 60]):
            torch.testing.assert_close(fetched, plain, rtol=1e-6, atol=1e-6)
    assert twin.offload.counters.misses > 4 * len(KINDS)


def test_a_token_that_needs_too_many_blocks_is_refused() -> None:
    twin = Twin(capacity=2)
    with twin.offload, pytest.raises(OffloadCapacityError, match=r"found 2; .* at least") as raised:
        twin.step([180, 180], k=40)
    assert raised.value.capacity == 2
    assert raised.value.needed > 2


def test_memory_is_bounded() -> None:
    twin = Twin(capacity=8)
    pool, store = twin.offload.pool, twin.offload.store
    addresses = [t.data_ptr() for t in (*pool, store.latent, store.rope)]
    assert twin.offload.pool_bytes == 8 * 16 * (LATENT + ROPE) * 4
    assert twin.offload.pool_bytes == sum(t.numel() * 4 for t in pool)
    assert store.num_bytes == sum(t.numel() * 4 for t in (store.latent, store.rope))
    with twin.offload:
        for _ in range(4):
            twin.step([20, 20])
    assert addresses == [t.data_ptr() for t in (*twin.offload.pool, store.latent, store.rope)]
    assert sum(len(twin.offload.resident(layer)) for layer in range(3)) <= 8


def test_control_another_byte_in_the_pool_differs() -> None:
    twin = Twin(capacity=40)
    with twin.offload:
        twin.step([60, 45], k=64)
        twin.offload.pool[0].add_(1e-3)
        assert any(not torch.equal(*pair) for pair in twin.step([1, 1], k=64))


class WrongLayer(HostKvStore):
    """Copies the blocks of another layer."""

    def copy_blocks(self, layer: int, *arguments: Any) -> None:
        super().copy_blocks((layer + 1) % 3, *arguments)


def test_control_blocks_of_another_layer_differ() -> None:
    twin = Twin(capacity=24, store_class=WrongLayer)
    with twin.offload:
        same = [torch.allclose(*pair) for pair in twin.step([30, 30])]
    # Layer 1 was prefetched before its rows were written, and writing repairs what the pool holds.
    assert same == [False, True, False]


class Recorder(HostKvStore):
    """Remembers which thread copied for which layer; fails on demand."""

    copies: list[tuple[str, int]]
    failing: set[int]

    def copy_blocks(self, layer: int, *arguments: Any) -> None:
        RECORD.append((threading.current_thread().name, layer))
        if layer in FAILING:
            raise OSError("bus error")
        super().copy_blocks(layer, *arguments)


RECORD: list[tuple[str, int]] = []
FAILING: set[int] = set()


@pytest.fixture(autouse=True)
def _nothing_recorded() -> None:
    RECORD.clear()
    FAILING.clear()


def test_prefetches_run_beside_the_caller() -> None:
    twin = Twin(capacity=24, store_class=Recorder)
    with twin.offload:
        twin.step([60, 45])
    caller = threading.current_thread().name
    assert (caller, 0) in RECORD
    assert any(name.startswith("kv-offload") and layer == 1 for name, layer in RECORD)
    assert not any(name == caller and layer == 1 for name, layer in RECORD)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_failed_copy_reaches_the_caller_and_leaves_nothing_behind(layer: int) -> None:
    """Layer 0 fails where it waits, layer 1 in the second thread."""
    twin = Twin(capacity=24, store_class=Recorder)
    with twin.offload:
        FAILING.add(layer)
        with pytest.raises(OSError, match="bus error"):
            twin.step([30, 30])
        assert twin.offload.resident(layer) == {}
        FAILING.clear()
        twin.done = [0, 0]
        for plain, fetched in twin.step([30, 30]):  # the same step once more
            torch.testing.assert_close(fetched, plain, rtol=1e-6, atol=1e-6)


def store(layers: int = 3) -> HostKvStore:
    return HostKvStore.allocate(shape(4, 32), layers, torch.float32, 16)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((store(), 0, GROUPS), "capacity_blocks"),
        ((store(2), 4, GROUPS), "groups"),
        ((store(), 4, GROUPS[:1]), "groups"),
        ((store(), 4, GROUPS, "meta"), "device"),
    ],
)
def test_impossible_pools_are_named(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"{field}: found"):
        SelectedKvOffload(*arguments)


@pytest.mark.parametrize(
    ("arguments", "field"), [((0, 16), "num_layers"), ((2, 24), "fetch_block_size")]
)
def test_impossible_stores_are_named(arguments: tuple[int, int], field: str) -> None:
    layers, fetch = arguments
    with pytest.raises(InvalidFieldError, match=f"{field}: found"):
        HostKvStore.allocate(shape(4, 32), layers, torch.float32, fetch)


def test_metadata_of_other_blocks_is_refused() -> None:
    batch = AttentionBatch.from_lengths([1], [5], 32)
    metadata = AscendSFAMetadataBuilder(32).build(batch)
    query = torch.zeros(1, HEADS, LATENT), torch.zeros(1, HEADS, ROPE)
    with (
        SelectedKvOffload(store(), 4, GROUPS) as offload,
        pytest.raises(InvalidFieldError, match="kernel_block_size: found 32; allowed: 16"),
    ):
        offload.forward(
            impl(), 0, *query, torch.zeros(1, 1, 3, dtype=torch.int32), metadata, query[0].clone()
        )

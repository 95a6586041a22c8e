"""The shared buffer of choices, groups of layers, rotation styles, and the index cache."""

from __future__ import annotations

import pytest
import torch

from ascend_attn_backends import (
    AscendSFAIndexerImpl,
    IndexGroup,
    IndexRope,
    InvalidFieldError,
    SparseCacheShape,
    StaleSelectionError,
    TopKBuffer,
    index_groups,
    kernel_block_size_for,
    kernel_block_table,
    kernel_view,
    rotate_index_rows,
)

FULL, SHARED = "full", "shared"


def test_groups() -> None:
    groups = index_groups([FULL, FULL, SHARED, SHARED, FULL])
    assert [group.layers for group in groups] == [(0,), (1, 2, 3), (4,)]
    assert [group.leader for group in groups] == [0, 1, 4]
    assert [groups[1].next_layer(layer) for layer in (1, 2, 3)] == [2, 3, None]
    assert index_groups([]) == ()


@pytest.mark.parametrize(
    ("kinds", "field"), [([SHARED], "indexer_types[0]"), ([FULL, "half"], "indexer_types[1]")]
)
def test_impossible_groups_are_named(kinds: list[str], field: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        index_groups(kinds)
    assert raised.value.field == field


def test_a_layer_of_another_group_is_named() -> None:
    with pytest.raises(InvalidFieldError, match=r"layer: found 7; allowed: one of \[0, 1\]"):
        IndexGroup(0, (0, 1)).next_layer(7)


FIRST, SECOND = index_groups([FULL, SHARED, FULL, SHARED])


def choice(rows: int, width: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + rows * width, dtype=torch.int32).view(rows, 1, width)


def test_followers_read_their_leaders_choice_at_one_address() -> None:
    buffer = TopKBuffer(6, 4)
    address = buffer.indices.data_ptr()
    for step in range(3):
        buffer.begin_step()
        for group in (FIRST, SECOND):
            chosen = choice(5, 4, 100 * step + group.leader)
            buffer.write(group, chosen)
            for layer in group.layers:
                found = buffer.read(group, layer, 5)
                assert torch.equal(found, chosen)
                assert found.data_ptr() == address


def test_rows_and_entries_that_were_not_written_are_masked() -> None:
    """A long step, then a short one: nothing of the long one is left."""
    buffer = TopKBuffer(6, 4)
    buffer.write(FIRST, choice(6, 4))
    buffer.write(FIRST, choice(2, 3))
    found = buffer.read(FIRST, 1, 6)
    assert found[:2, 0, :3].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found[:2, 0, 3] == -1).all()
    assert (found[2:] == -1).all()
    buffer.begin_step()
    assert (buffer.indices == -1).all()


def test_stale_choices_are_refused() -> None:
    buffer = TopKBuffer(6, 4)
    with pytest.raises(StaleSelectionError, match="layer 1: found no choice in this step"):
        buffer.read(FIRST, 1, 2)
    buffer.write(FIRST, choice(2, 4))
    with pytest.raises(StaleSelectionError, match="layer 3: found that of layer 0") as raised:
        buffer.read(SECOND, 3, 2)
    assert (raised.value.layer, raised.value.written_by) == (3, 0)
    buffer.begin_step()
    with pytest.raises(StaleSelectionError):
        buffer.read(FIRST, 1, 2)


@pytest.mark.parametrize("chosen", [choice(7, 4), choice(2, 5), torch.zeros(2, 4)])
def test_choices_that_do_not_fit_are_refused(chosen: torch.Tensor) -> None:
    with pytest.raises(InvalidFieldError, match="topk_indices"):
        TopKBuffer(6, 4).write(FIRST, chosen)


@pytest.mark.parametrize(("sizes", "field"), [((0, 4), "max_tokens"), ((4, 0), "top_k")])
def test_empty_buffers_are_refused(sizes: tuple[int, int], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        TopKBuffer(*sizes)


def test_reads_outside_are_refused() -> None:
    buffer = TopKBuffer(6, 4)
    buffer.write(FIRST, choice(2, 4))
    with pytest.raises(InvalidFieldError, match="num_tokens: found 7"):
        buffer.read(FIRST, 0, 7)
    with pytest.raises(InvalidFieldError, match="layer: found 2"):
        buffer.read(FIRST, 2, 1)


def test_rotation_is_the_complex_product() -> None:
    """In both styles a pair (a, b) becomes (a + ib) * exp(i * angle)."""
    rows = torch.randn(3, 2, 128, dtype=torch.float32)
    angle = torch.rand(3, 32) * 6
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    for style, first, second in (
        (IndexRope.HALF, rows[..., :32], rows[..., 32:64]),
        (IndexRope.INTERLEAVED, rows[..., 0:64:2], rows[..., 1:64:2]),
    ):
        product = torch.complex(first, second) * turn
        expected = torch.cat([product.real, product.imag, rows[..., 64:]], -1)
        found = rotate_index_rows(rows, cos, sin, style)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_rotating_nothing() -> None:
    empty = torch.zeros(0, 2, 128)
    found = rotate_index_rows(empty, torch.zeros(0, 64), torch.zeros(0, 64), IndexRope.HALF)
    assert found.shape == empty.shape


@pytest.mark.parametrize("shape", [(2, 64), (3, 130)])
def test_rotations_that_do_not_fit_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InvalidFieldError, match="rows, cos"):
        rotate_index_rows(torch.zeros(3, 2, 128), *[torch.zeros(shape)] * 2, IndexRope.HALF)


def test_a_factor_in_the_weights_is_a_factor_of_the_scores() -> None:
    impl = AscendSFAIndexerImpl(16, 4)
    weights = torch.randn(3, 16)
    torch.testing.assert_close(impl.scaled_weights(weights), weights / 4 / 128**0.5)


@pytest.mark.parametrize(("arguments", "field"), [((0,), "num_heads"), ((4, 0), "top_k")])
def test_indexers_of_nothing_are_refused(arguments: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        AscendSFAIndexerImpl(*arguments)


def test_write_names_missing_rows() -> None:
    with pytest.raises(InvalidFieldError, match=r"index_key: found \[1, 128\]"):
        AscendSFAIndexerImpl(4).write_kv(
            torch.zeros(1, 128), torch.zeros(2, 1, 16, 128), torch.zeros(2, dtype=torch.int64)
        )


def test_cache_shapes_and_bytes() -> None:
    shape = SparseCacheShape(num_blocks=7769, block_size=128)
    assert shape.latent.logical == (7769, 1, 128, 512)
    assert shape.rope.logical == (7769, 1, 128, 64)
    assert shape.index is not None
    assert shape.index.logical == (7769, 1, 128, 128)
    assert shape.bytes_per_token(torch.bfloat16) == 2 * (512 + 64 + 128)
    shared = SparseCacheShape(num_blocks=2**24, block_size=128, has_indexer=False)
    assert shared.index is None
    assert shared.num_bytes(torch.bfloat16) == 2**24 * 128 * 2 * 576


@pytest.mark.parametrize(
    ("block", "kernel"), [(16, 16), (128, 128), (1024, 1024), (1040, 208), (2048, 1024)]
)
def test_kernel_block_sizes(block: int, kernel: int) -> None:
    assert kernel_block_size_for(block) == kernel
    assert block % kernel == kernel % 16 == 0


def test_kernel_blocks_address_the_same_tokens() -> None:
    cache = torch.arange(5 * 64.0).view(5, 1, 64, 1)
    table = torch.tensor([[3, 0], [4, 2]], dtype=torch.int32)
    view, expanded = kernel_view("cache", cache, 16), kernel_block_table(table, 4)
    assert expanded.dtype == torch.int32
    for row in range(2):
        for position in range(128):
            block = int(table[row, position // 64])
            kernel = int(expanded[row, position // 16])
            assert view[kernel, position % 16, 0, 0] == cache[block, 0, position % 64, 0]
    assert view.data_ptr() == cache.data_ptr()

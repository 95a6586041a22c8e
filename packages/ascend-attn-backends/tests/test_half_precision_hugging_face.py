"""Attention in bfloat16 against Hugging Face's eager modules, by the vendor's comparison.

Oracle and comparison are described in half_precision.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the test extra installs transformers")

from half_precision import HalfCache, assert_vendor_close, attention_results, rounded
from latent_hugging_face import OursMLA, deepseek_v3, projected, up_projection
from latent_schedules import SCHEDULES, Chunk, schedules
from qwen3_hugging_face import PagedQwen3, qwen3
from sparse_hugging_face import NOPE, TOP_K, Family, Ours, family, run

from ascend_attn_backends import (
    AscendAttentionBackend,
    AscendSFAImpl,
    AttentionBatch,
)

HALF = torch.bfloat16
Attended = tuple[torch.Tensor, torch.Tensor]
"""Attention results of all kept tokens, ours and theirs."""


def blocks_of(block_size: int) -> int:
    return 32 if block_size == 16 else 8


def standard(
    schedule: list[list[Chunk]], block_size: int, seed: int, **faults: Any
) -> list[Attended]:
    layer = PagedQwen3(
        rounded(qwen3()),
        AscendAttentionBackend,
        block_size,
        blocks_of(block_size),
        dtype=HALF,
        **faults,
    )
    return list(zip(*run(layer, schedule, seed, attention_results), strict=True))


class HalfMLA(OursMLA):
    """The latent backend on rounded queries and caches; results before the output projection."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.caches = tuple(cache.to(HALF) for cache in self.caches)

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        metadata = self.builder.build(attrs.evolve(batch, causal=self.causal))
        rows = projected(self.found, hidden, positions)
        half = [tensor.to(HALF) for tensor in attrs.astuple(rows, recurse=False)]
        self.impl.write_kv(*half[2:], *self.caches, metadata.slot_mapping)
        result = torch.full_like(half[0], torch.nan)
        self.impl.forward_mqa(*half[:2], *self.caches, metadata, result)
        return [values_of(self.found.layers[0], result)]


def values_of(layer: Any, latents: torch.Tensor) -> torch.Tensor:
    """``[T, N * Dv]`` values of latent results ``[T, N, 512]``."""
    up = up_projection(layer)[:, NOPE:]
    return torch.einsum("tnl,nvl->tnv", latents.float(), up).flatten(1)


def with_single_latents(found: Family) -> Family:
    """Up-projections in which every key and value element is one of the 512 latents.

    The absorbed form rounds queries after the key half and results before the value half, the
    module has neither. Where both halves only pick, rounding falls on the same numbers, and the
    module's results are those of the operator: the tolerance is for these, not for sums of them.
    """
    with torch.no_grad():
        for layer in found.layers:
            up = up_projection(layer)
            places = torch.arange(up.shape[0] * up.shape[1]) * 5 % up.shape[2]
            up.copy_(torch.nn.functional.one_hot(places, up.shape[2]).view_as(up))
    return found


def latent(
    schedule: list[list[Chunk]], block_size: int, seed: int, **faults: Any
) -> list[Attended]:
    layer = HalfMLA(
        rounded(with_single_latents(deepseek_v3())), block_size, blocks_of(block_size), **faults
    )
    return list(zip(*run(layer, schedule, seed, attention_results), strict=True))


Place = tuple[int, int]
"""Request and position of a token."""


class HalfSFA(Ours):
    """The sparse backends on rounded rows; keeps which keys each token chose."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.caches = [[cache.to(HALF) for cache in caches] for caches in self.caches]
        self.chosen: dict[Place, list[int]] = {}

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        batch = attrs.evolve(batch, causal=self.causal)
        rotary = tuple(part[0] for part in self.found.rotary(hidden[None], positions[None]))
        metadata, index_metadata = self.builder.build(batch), self.index_builder.build(batch)
        outputs = []
        for layer, (latents, ropes, index) in zip(self.found.layers, self.caches, strict=True):
            residual = layer.q_a_layernorm(layer.q_a_proj(hidden))
            if layer.indexer is not None:
                arguments = (layer.indexer, hidden, residual, rotary, index, index_metadata)
                chosen = self.choose(*arguments)
                self.keep(chosen, positions, batch)
            rows = self.project(layer, hidden, residual, rotary)
            query, turned, new, key_rope = (tensor.to(HALF) for tensor in rows)
            impl = AscendSFAImpl(4, layer.scaling * self.scale_change)
            impl.write_kv(new, key_rope, latents, ropes, metadata.slot_mapping)
            result = torch.full_like(query, torch.nan)
            impl.forward(query, turned, latents, ropes, chosen, metadata, result)
            outputs.append(values_of(layer, result))
        return outputs

    def choose(self, *arguments: Any) -> torch.Tensor:
        """The choice of the indexer on rounded queries, keys and weights."""
        write, forward = self.indexer.write_kv, self.indexer.forward

        def write_half(rows: torch.Tensor, *more: Any) -> None:
            write(rows.to(HALF), *more)

        def forward_half(query: torch.Tensor, weights: torch.Tensor, *more: Any) -> torch.Tensor:
            return forward(query.to(HALF), weights.to(HALF), *more)

        with (
            mock.patch.object(self.indexer, "write_kv", write_half),
            mock.patch.object(self.indexer, "forward", forward_half),
        ):
            return super().choose(*arguments)

    def keep(self, chosen: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> None:
        """Of a position that is computed again, the last choice counts."""
        lens = batch.query_start_loc.diff()
        rows = torch.repeat_interleave(torch.arange(len(lens)), lens).tolist()
        for row, position, keys in zip(
            rows, positions.tolist(), chosen[:, 0].tolist(), strict=True
        ):
            self.chosen[row, position] = [key for key in keys if key >= 0]


@contextmanager
def index_scores(scores: list[torch.Tensor]) -> Iterator[None]:
    """Notes what Hugging Face's indexer takes the largest of."""
    original = torch.Tensor.topk

    def noting(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        scores.append(self)
        return original(self, *arguments, **options)

    with mock.patch.object(torch.Tensor, "topk", noting):
        yield


@attrs.define(eq=False)
class SparseOracle:
    """The eager modules with our choice of keys, after that choice was judged by their scores."""

    ours: HalfSFA
    request: int = 0

    def __call__(self, found: Family, hidden: torch.Tensor) -> list[torch.Tensor]:
        chosen = [self.ours.chosen[self.request, position] for position in range(len(hidden))]
        self.request += 1
        self.judge(found.layers[0], found, hidden, chosen)
        width = max(map(len, chosen))
        padded = torch.tensor([[keys + keys[:1] * (width - len(keys)) for keys in chosen]])
        choice = mock.patch.object(found.layers[0].indexer, "forward", return_value=padded.int())
        with choice:
            return attention_results(found, hidden, HALF)

    @staticmethod
    @torch.no_grad()
    def judge(layer: Any, found: Family, hidden: torch.Tensor, chosen: list[list[int]]) -> None:
        """No key left out is better than a chosen one by more than rounding."""
        scores: list[torch.Tensor] = []
        positions = torch.arange(len(hidden))
        mask = torch.where(positions[:, None] >= positions, 0.0, -torch.inf)
        residual = layer.q_a_layernorm(layer.q_a_proj(hidden[None]))
        rotary = found.rotary(hidden[None], positions[None])
        with index_scores(scores):
            layer.indexer(hidden[None], residual, rotary, mask[None], None, cache=HalfCache(HALF))
        for row, keys in enumerate(chosen):
            own = scores[0][0, row, : row + 1]
            assert len(set(keys)) == len(keys) == min(TOP_K, row + 1)
            left = own.index_fill(0, torch.tensor(keys), -torch.inf)
            assert float(left.max()) <= float(own[keys].min()) + 2**-7 * float(own.abs().max())


def sparse(
    schedule: list[list[Chunk]], block_size: int, seed: int, **faults: Any
) -> list[Attended]:
    found = rounded(with_single_latents(family("glm_moe_dsa")))
    layer = HalfSFA(found, block_size, blocks_of(block_size), **faults)
    return list(zip(*run(layer, schedule, seed, SparseOracle(layer)), strict=True))


Attend = Callable[..., list[Attended]]
BACKENDS: dict[str, Attend] = {"qwen3": standard, "deepseek_v3": latent, "glm_moe_dsa": sparse}


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_eager_module(name: str, schedule: str, block_size: int) -> None:
    for found, expected in BACKENDS[name](SCHEDULES[schedule], block_size, 0):
        assert_vendor_close(found, expected, HALF)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("name", BACKENDS)
def test_verification_of_k_drafts(name: str, k: int) -> None:
    accepted = k // 2 + 1
    verify = [(accepted, k + 1 - accepted), (1, k)]
    schedule = [[(21, 0), (13, 0)], verify, verify[::-1], [(1, 0), (1, 0)]]
    for found, expected in BACKENDS[name](schedule, 16, k):
        assert_vendor_close(found, expected, HALF)


@given(
    st.sampled_from(sorted(BACKENDS)), schedules(), st.sampled_from([16, 128]), st.integers(0, 99)
)
def test_any_schedule(name: str, schedule: list[list[Chunk]], block_size: int, seed: int) -> None:
    for found, expected in BACKENDS[name](schedule, block_size, seed):
        assert_vendor_close(found, expected, HALF)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, {"scale_change": 1.05}) for name in BACKENDS),
        *((name, {"causal": False}) for name in ("qwen3", "deepseek_v3")),
    ],
)
def test_control_a_broken_layer_is_outside(name: str, fault: dict[str, Any]) -> None:
    found, expected = BACKENDS[name](SCHEDULES["prefill at once"], 16, 0, **fault)[0]
    with pytest.raises(AssertionError, match="elements outside"):
        assert_vendor_close(found, expected, HALF)


@pytest.mark.parametrize("fault", [{"top_k": TOP_K - 1}, {"causal": False}])
def test_control_a_broken_choice_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        sparse(SCHEDULES["prefill at once"], 16, 0, **fault)


def test_control_the_comparison_counts_outliers() -> None:
    expected = torch.ones(1000)
    few = expected.clone()
    few[:5] = 1.1
    assert_vendor_close(few, expected, HALF)
    few[5] = 1.1
    with pytest.raises(AssertionError, match="6 of 1000 elements outside"):
        assert_vendor_close(few, expected, HALF)
    few = expected.clone()
    few[0] = 12.0
    with pytest.raises(AssertionError):
        assert_vendor_close(few, expected, HALF)
    few[0] = torch.nan
    with pytest.raises(AssertionError):
        assert_vendor_close(few, expected, HALF)

"""Values of a batch are checked while debugging, by every builder, and not otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import Scenario
from draft_flash_support import run_draft
from fa3_support import run_fa3
from latent_support import LatentScenario
from sparse_oracle import SparseStep

import ascend_attn_backends.batch
from ascend_attn_backends import (
    AscendAttentionMetadataBuilder,
    AscendDSAMetadataBuilder,
    AscendFAMetadataBuilder,
    AscendFlashAttentionMetadataBuilder,
    AscendMlaDCPMetadataBuilder,
    AscendMLAMetadataBuilder,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    ContextShard,
    draft_step,
    sharded_batch,
)
from ascend_attn_ops import sanitize

SHARD = ContextShard(rank=1, size=2)
BUILDERS: dict[str, Callable[[], Any]] = {
    "standard": lambda: AscendAttentionMetadataBuilder(16),
    "mla": lambda: AscendMLAMetadataBuilder(16),
    "mla_dcp": lambda: AscendMlaDCPMetadataBuilder(16, shard=SHARD),
    "sfa": lambda: AscendSFAMetadataBuilder(16),
    "sfa_indexer": lambda: AscendSFAIndexerMetadataBuilder(16),
    "draft_flash": lambda: AscendFlashAttentionMetadataBuilder(16),
    "fa3": lambda: AscendFAMetadataBuilder(16),
    "dsa": lambda: AscendDSAMetadataBuilder(16, num_heads=8),
}


def batch_for(name: str) -> AttentionBatch:
    """Three requests: a chunk, a decode, a verification; with padding."""
    query_lens, seq_lens = [5, 1, 4], [20, 33, 9]
    if name == "mla_dcp":
        return sharded_batch(query_lens, seq_lens, 16, SHARD)
    return AttentionBatch.from_lengths(query_lens, seq_lens, 16).padded(4, 16)


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ASCEND_ATTN_SANITIZE", "1")
    yield


@contextmanager
def development_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``python -X dev``, whose flag cannot be set in a running interpreter."""
    flags = SimpleNamespace(flags=SimpleNamespace(dev_mode=True))
    monkeypatch.setattr(ascend_attn_backends.batch, "sys", flags)
    yield


@contextmanager
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with sanitize():
        yield


MODES = {"variable": environment, "development mode": development_mode, "context": context}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


FAULTS: dict[str, tuple[Callable[[AttentionBatch], dict[str, Any]], str]] = {
    "a negative start": (
        lambda b: {"query_start_loc": ints(0, 5, -1, 10, 10), "query_start_loc_cpu": None},
        r"query_start_loc\[2\]: found -1; allowed: at least 5",
    ),
    "a stale key count in a padding row": (
        lambda b: {"seq_lens": ints(20, 33, 9, 7), "seq_lens_cpu": None},
        r"seq_lens\[3\]: found 7; allowed: 0 in a padding row",
    ),
    "fewer keys than tokens": (
        lambda b: {"seq_lens": ints(20, 33, 3, 0), "seq_lens_cpu": None},
        r"seq_lens\[2\]: found 3; allowed: at least the 4 query tokens",
    ),
    "a slot in padding": (
        lambda b: {"slot_mapping": b.slot_mapping.index_fill(0, torch.tensor([12]), 3)},
        r"slot_mapping\[12\]: found 3; allowed: negative",
    ),
    "a slot twice": (
        lambda b: {"slot_mapping": b.slot_mapping.index_fill(0, torch.tensor([0, 1]), 77)},
        r"slot_mapping\[1\]: found 77; allowed: a slot of its own",
    ),
    "a host copy of another step": (
        lambda b: {"seq_lens_cpu": ints(20, 32, 9, 0)},
        r"seq_lens_cpu\[1\]: found 32; allowed: 33 as in seq_lens",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "mla_dcp"])
def test_builders_name_the_first_bad_element(name: str, fault: str) -> None:
    change, message = FAULTS[fault]
    batch = batch_for(name)
    broken = attrs.evolve(batch, **change(batch))
    BUILDERS[name]().build(broken)  # repaired, or somebody else's business
    with sanitize(), pytest.raises(AttentionBatchError, match=message):
        BUILDERS[name]().build(broken)


@pytest.mark.parametrize("mode", MODES)
def test_three_ways_to_ask_for_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_for("standard")
    broken = attrs.evolve(batch, query_start_loc=ints(0, 5, -1, 10, 10), query_start_loc_cpu=None)
    with MODES[mode](monkeypatch):
        AscendAttentionMetadataBuilder(16).build(batch)
        with pytest.raises(AttentionBatchError, match=r"query_start_loc\[2\]"):
            AscendAttentionMetadataBuilder(16).build(broken)


def test_the_context_can_switch_the_variable_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_ATTN_SANITIZE", "1")
    batch = batch_for("standard")
    broken = attrs.evolve(batch, query_start_loc=ints(0, 5, -1, 10, 10), query_start_loc_cpu=None)
    with sanitize(False):
        AscendAttentionMetadataBuilder(16).build(broken)


@pytest.mark.parametrize("name", ["standard", "sfa", "sfa_indexer", "fa3"])
def test_a_block_row_that_is_too_narrow_is_named(name: str) -> None:
    """Device lengths alone; without debugging they are held to the row on the device."""
    batch = AttentionBatch.from_lengths([1, 1], [32, 5], 16)
    stale = attrs.evolve(batch, seq_lens=ints(33, 5), seq_lens_cpu=None, max_seq_len=33)
    if name != "standard":
        BUILDERS[name]().build(stale)
    with sanitize(), pytest.raises(AttentionBatchError, match=r"block_table: found 2 columns"):
        BUILDERS[name]().build(stale)


@pytest.mark.parametrize("name", BUILDERS)
def test_good_batches_pass(name: str) -> None:
    with sanitize():
        BUILDERS[name]().build(batch_for(name))


RUNS: dict[str, Callable[[], object]] = {
    "standard": lambda: Scenario([5, 1, 4], [20, 33, 9], window=6).run(),
    "fa3": lambda: run_fa3(Scenario([5, 1, 4], [20, 33, 9])),
    "draft_flash": lambda: run_draft(Scenario([5, 1, 4], [20, 33, 9], head_size=64)),
    "mla": lambda: LatentScenario([5, 1, 4], [20, 33, 9]).run(),
    "sfa": lambda: SparseStep([5, 1, 4], [20, 33, 9]).run(),
}


@pytest.mark.parametrize("name", RUNS)
def test_whole_layers_pass(name: str) -> None:
    """Builders and operators together: what this package calls has legal values."""
    with sanitize():
        assert RUNS[name]() is not None


def test_draft_steps_at_the_end_of_their_row_pass() -> None:
    """Unused tokens lie past the row; they are no fault."""
    batch = AttentionBatch.from_lengths([4], [31], 16)
    builder = AscendFlashAttentionMetadataBuilder(16)
    with sanitize():
        for offset in range(4):
            step = draft_step(
                batch, ints(0), offset=offset, query_len=2, block_size=16, max_model_len=64
            )
            builder.build(step.batch, step.num_unused)


@pytest.mark.parametrize(
    "name", [name for name in BUILDERS if name not in ("standard", "mla", "mla_dcp")]
)
def test_tensors_without_values_pass(name: str) -> None:
    batch = AttentionBatch.from_lengths([3, 1], [5, 17], 16, device="meta")
    with sanitize():
        BUILDERS[name]().build(attrs.evolve(batch, query_start_loc_cpu=None, seq_lens_cpu=None))

"""Decode and draft steps of four backends on an NPU, for counting what the host does in them.

Not a test: test_host_preparation.py and benchmarks/bench_npu_host_preparation.py run it. A step is
what a server does between two forward passes and in them: build the metadata, then write and
attend in every layer. The batch itself is the caller's; its host copies are what a scheduler knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

import ascend_attn_backends as backends
from ascend_attn_backends import AttentionBatch

BLOCK_SIZE, MAX_MODEL_LEN, STEPS = 16, 64, 4
HEADS, KV_HEADS, HEAD_SIZE, LATENT, ROPE, CHOSEN = 4, 2, 64, 512, 64, 16
DTYPE = torch.bfloat16
Metadata = Any
Layer = Callable[[Metadata], torch.Tensor]


@attrs.frozen(kw_only=True)
class Scale:
    """How large a step is.

    Attributes:
        lengths: Keys of each request in the first step, at most ``MAX_MODEL_LEN - STEPS``.
        windows: Sliding window of each dense layer, None for all keys.
    """

    lengths: tuple[int, ...] = (20, 9, 33)
    windows: tuple[int | None, ...] = (None, 8, None, 8)

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def geometries(self) -> int:
        """Plans that a draft step needs."""
        return len(set(self.windows))


def normal(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g).to(DTYPE).npu()


def decode_batch(scale: Scale, step: int) -> AttentionBatch:
    """One token for each request, after ``step`` earlier ones."""
    keys = [length + step for length in scale.lengths]
    columns = MAX_MODEL_LEN // BLOCK_SIZE
    table = torch.arange(len(keys) * columns, dtype=torch.int32).view(len(keys), columns)
    return AttentionBatch.from_lengths(
        [1] * len(keys), keys, BLOCK_SIZE, block_table=table, device="npu"
    )


def device_only(batch: AttentionBatch) -> AttentionBatch:
    """The batch without its host copies."""
    return attrs.evolve(batch, query_start_loc_cpu=None, seq_lens_cpu=None)


def bounds_only(batch: AttentionBatch) -> AttentionBatch:
    """As vLLM describes a step whose drafts are in flight: exact starts, bounds on the keys."""
    assert batch.seq_lens_cpu is not None
    drafts = torch.arange(batch.num_reqs, dtype=torch.int32) % 3
    return attrs.evolve(
        batch, seq_lens_cpu=None, seq_lens_cpu_upper_bound=batch.seq_lens_cpu + drafts
    )


def whole(batch: AttentionBatch) -> AttentionBatch:
    """The batch with exact host lengths, as a scheduler has them when no draft is in flight."""
    return batch


def cache(scale: Scale, kv_heads: int, size: int) -> torch.Tensor:
    blocks = len(scale.lengths) * MAX_MODEL_LEN // BLOCK_SIZE
    return normal(blocks, BLOCK_SIZE, kv_heads, size).transpose(1, 2)


def standard_layers(scale: Scale) -> list[Layer]:
    return [_dense(backends.AscendAttentionBackendImpl, scale, w) for w in scale.windows]


def draft_layers(scale: Scale) -> list[Layer]:
    return [_dense(backends.AscendFlashAttentionImpl, scale, w) for w in scale.windows]


def _dense(kind: Any, scale: Scale, window: int | None) -> Layer:
    layer = kind(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, window)
    count = len(scale.lengths)
    caches = cache(scale, KV_HEADS, HEAD_SIZE), cache(scale, KV_HEADS, HEAD_SIZE)
    rows = normal(count, KV_HEADS, HEAD_SIZE), normal(count, KV_HEADS, HEAD_SIZE)
    query = normal(count, HEADS, HEAD_SIZE)

    def run(metadata: Metadata) -> torch.Tensor:
        layer.write_kv(*rows, *caches, metadata.slot_mapping)
        out: torch.Tensor = layer.forward(query, *caches, metadata, torch.empty_like(query))
        return out

    return run


def latent_layers(scale: Scale) -> list[Layer]:
    layer = backends.AscendMLAImpl(HEADS, (LATENT + ROPE) ** -0.5)
    attend = _latent(scale, layer, lambda q, c, m, o: layer.forward_mqa(*q, *c, m, o))
    return [attend] * scale.layers


def sparse_layers(scale: Scale) -> list[Layer]:
    layer = backends.AscendSFAImpl(HEADS, (LATENT + ROPE) ** -0.5)
    chosen = torch.arange(CHOSEN, dtype=torch.int32).repeat(len(scale.lengths), 1).npu()
    attend = _latent(scale, layer, lambda q, c, m, o: layer.forward(*q, *c, chosen, m, o))
    return [attend] * scale.layers


def _latent(scale: Scale, layer: Any, attend: Callable[..., torch.Tensor]) -> Layer:
    count = len(scale.lengths)
    caches = cache(scale, 1, LATENT), cache(scale, 1, ROPE)
    rows = normal(count, LATENT), normal(count, ROPE)
    queries = normal(count, HEADS, LATENT), normal(count, HEADS, ROPE)

    def run(metadata: Metadata) -> torch.Tensor:
        layer.write_kv(*rows, *caches, metadata.slot_mapping)
        return attend(queries, caches, metadata, torch.empty_like(queries[0]))

    return run


@attrs.frozen
class Subject:
    """A backend under count.

    Attributes:
        name: As in the table of backends; with exact host lengths it ends in ``_host``.
        layers: Makes the layers.
        builder: Class of its builder.
        known: What of the lengths the host knows in its steps; makes it from the whole batch.
        drafts: Whether its steps are those of a draft.
        families: Products that have it.
    """

    name: str
    layers: Callable[[Scale], list[Layer]]
    builder: Callable[[int], Any]
    known: Callable[[AttentionBatch], AttentionBatch] = device_only
    drafts: bool = False
    families: tuple[str, ...] = ("A2", "A3", "A5")


SUBJECTS = (
    Subject(
        "draft_flash",
        draft_layers,
        backends.AscendFlashAttentionMetadataBuilder,
        drafts=True,
        families=("A5",),
    ),
    Subject("mla", latent_layers, backends.AscendMLAMetadataBuilder, bounds_only),
    Subject("mla_host", latent_layers, backends.AscendMLAMetadataBuilder, whole),
    Subject("sfa", sparse_layers, backends.AscendSFAMetadataBuilder),
    Subject("standard", standard_layers, backends.AscendAttentionMetadataBuilder, bounds_only),
    Subject("standard_host", standard_layers, backends.AscendAttentionMetadataBuilder, whole),
)


def _batches(subject: Subject, scale: Scale) -> Iterator[tuple[AttentionBatch, tuple[Any, ...]]]:
    """Batch of each step, and what else its builder takes."""
    if not subject.drafts:
        for step in range(STEPS):
            yield subject.known(decode_batch(scale, step)), ()
        return
    verified = device_only(decode_batch(scale, 0))
    rejected = torch.tensor([row % 2 for row in range(len(scale.lengths))], dtype=torch.int32).npu()
    for offset in range(STEPS):
        step = backends.draft_step(
            verified, rejected, offset=offset, query_len=1, block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
        )  # fmt: skip
        yield step.batch, (step.num_unused,)


def shared_steps(subject: Subject, scale: Scale) -> Iterator[list[torch.Tensor]]:
    """Steps of this project: metadata once for all layers; yields the outputs of each step."""
    layers, builder = subject.layers(scale), subject.builder(BLOCK_SIZE)
    for batch, more in _batches(subject, scale):
        metadata = builder.build(batch, *more)
        yield [layer(metadata) for layer in layers]


def naive_steps(subject: Subject, scale: Scale) -> Iterator[list[torch.Tensor]]:
    """The same steps when every layer prepares for itself, from lengths that it reads back."""
    layers = subject.layers(scale)
    for batch, more in _batches(subject, scale):
        plain = device_only(batch)
        yield [layer(_read_back(subject, plain, more)) for layer in layers]


def _read_back(subject: Subject, batch: AttentionBatch, more: tuple[Any, ...]) -> Metadata:
    """Metadata of one layer, with a cache of plans of its own."""
    starts, lens = batch.query_start_loc.cpu(), batch.seq_lens.cpu()
    known = attrs.evolve(
        batch,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lens.max()),
    )
    return subject.builder(BLOCK_SIZE).build(known, *more)


@attrs.frozen
class Work:
    """What the host did in one step.

    Attributes:
        device_to_host_copies: Copies back.
        synchronisations: Times that it waited.
        plans: Launches of flash_attn_metadata.
        launches: Operators launched, those of attention and all others.
    """

    device_to_host_copies: int
    synchronisations: int
    plans: int
    launches: int


def work_of(npu: Any, steps: Iterator[list[torch.Tensor]]) -> list[Work]:
    """Counts of each step on the emulator, making its batch and metadata included."""
    found = []
    while True:
        with npu.record() as seen:
            if next(steps, None) is None:
                return found
        counters, plans = seen.counters, len(seen.of("aclnnFlashAttnMetadata"))
        copies, waits = counters.device_to_host_copies, counters.synchronisations
        found.append(Work(copies, waits, plans, counters.launches))

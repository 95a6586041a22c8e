"""A small model whose decode steps run eager, or captured once per size and replayed.

Two layers, each with projections, a paged cache, and an attention call; the second may have a
sliding window over a cache of its own, whose block tables and key counts are other ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from ascend_attn_backends import (
    AscendAttentionBackend,
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AttentionBatch,
    AttentionMaskBuilder,
    CacheGroup,
    CapturedStep,
    CaptureSizes,
    FusedInferAttentionGraphParam,
    GraphParams,
    HostGraph,
    PagedAttentionGraphParam,
)

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 16, 16, 40
WIDTH = HEADS * SIZE
MAX_BLOCKS = 6
POISON = 1e4
MASKS = AttentionMaskBuilder()

Request = tuple[int, Sequence[int]]
"""Keys of a request, this step's tokens included, and its blocks."""


@attrs.frozen
class LayerKind:
    """One layer: its name, its group of block tables, its operator and its window."""

    name: str
    group: str
    operator: str = "fia"
    window: int | None = None


@attrs.define(eq=False)
class Layer:
    """Projections, cache and geometry of one layer, and the memory of one captured step."""

    kind: LayerKind
    weight: torch.Tensor
    caches: list[torch.Tensor]
    impl: AscendAttentionBackendImpl

    @classmethod
    def make(cls, kind: LayerKind, g: torch.Generator) -> Layer:
        shape = AscendAttentionBackend.cache_shape(BLOCKS, BLOCK, KV_HEADS, SIZE)
        weight = torch.randn(WIDTH, WIDTH + 2 * KV_HEADS * SIZE, generator=g) * 0.5 * WIDTH**-0.5
        caches = [shape.allocate(torch.float32).fill_(POISON) for _ in range(2)]
        impl = AscendAttentionBackendImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, kind.window)
        return cls(kind, weight, caches, impl)

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value; the position enters as a factor, as a rotary embedding would."""
        turned = hidden * (1.0 + 0.003 * positions[:, None].float())
        query, key, value = (turned @ self.weight).split([WIDTH, *[KV_HEADS * SIZE] * 2], -1)
        return [rows.unflatten(-1, (-1, SIZE)).contiguous() for rows in (query, key, value)]


@attrs.define(eq=False)
class Model:
    """The layers, and both ways to run a step of them."""

    kinds: Sequence[LayerKind]
    seed: int = 0
    layers: list[Layer] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.layers = [Layer.make(kind, g) for kind in self.kinds]

    def fill(self) -> None:
        """Keys and values of earlier tokens, the same for every model of these layers."""
        g = torch.Generator().manual_seed(1)
        for layer in self.layers:
            for cache in layer.caches:
                cache.copy_(torch.randn(cache.shape, generator=g))

    def eager(
        self, hidden: torch.Tensor, positions: torch.Tensor, batches: Mapping[str, AttentionBatch]
    ) -> torch.Tensor:
        """The step without a graph, by the standard backend."""
        for layer in self.layers:
            metadata = AscendAttentionMetadataBuilder(BLOCK).build(batches[layer.kind.group])
            query, key, value = layer.project(hidden, positions)
            layer.impl.write_kv(key, value, *layer.caches, metadata.slot_mapping)
            result = layer.impl.forward(query, *layer.caches, metadata, torch.empty_like(query))
            hidden = hidden + result.flatten(1)
        return hidden


@attrs.define(eq=False)
class Captured:
    """A model whose steps are captured once per size, and replayed.

    ``skip`` names layers whose recorded call is not renewed before a replay, for controls.
    """

    model: Model
    sizes: CaptureSizes
    role: str = "target"
    num_steps: int = 1
    skip: set[str] = attrs.field(factory=set)
    params: GraphParams = attrs.field(init=False)
    graphs: dict[tuple[int, int], HostGraph] = attrs.field(factory=dict)
    inputs: dict[tuple[int, int], torch.Tensor] = attrs.field(factory=dict)
    outputs: dict[tuple[int, int], torch.Tensor] = attrs.field(factory=dict)
    attention: dict[tuple[int, int], list[torch.Tensor]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        groups = {kind.group: CacheGroup(BLOCK, MAX_BLOCKS) for kind in self.model.kinds}
        self.params = GraphParams(self.role, self.sizes, groups, num_steps=self.num_steps)
        for number in range(self.num_steps):
            for size in self.sizes.sizes:
                self.capture(self.params.step(size, number))

    def capture(self, step: CapturedStep) -> None:
        """Capture the step while it is all padding, as engines do."""
        step.clear()
        key, graph = (step.size, step.number), HostGraph()
        hidden = self.inputs[key] = torch.zeros(step.size, WIDTH)
        self.graphs[key], self.attention[key] = graph, []
        with graph.capturing():
            for layer in self.model.layers:
                hidden = hidden + self.layer_step(layer, step, graph, hidden)
            self.outputs[key] = hidden

    def layer_step(
        self, layer: Layer, step: CapturedStep, graph: HostGraph, hidden: torch.Tensor
    ) -> torch.Tensor:
        buffers = step.buffers[layer.kind.group]
        query, key, value = layer.project(hidden, step.positions)
        layer.impl.write_kv(key, value, *layer.caches, buffers.slot_mapping)
        out = torch.empty_like(query)
        self.attention[step.size, step.number].append(out)
        arguments = (layer.kind.name, layer.impl, query, layer.caches, buffers, out)
        if layer.kind.operator == "paged":
            workspace = step.workspace(64)
            param = PagedAttentionGraphParam.of_layer(*arguments, workspace=workspace)
        else:
            param = FusedInferAttentionGraphParam.of_layer(*arguments, template=MASKS.template())
        step.record(param, graph)
        return out.flatten(1)

    def replay(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batches: Mapping[str, AttentionBatch],
        number: int = 0,
    ) -> torch.Tensor:
        """Prepare the next captured size, renew its calls, replay; rows of padding included."""
        step = self.params.prepare(batches, positions, number)
        return self.run(step, hidden)

    def run(self, step: CapturedStep, hidden: torch.Tensor) -> torch.Tensor:
        key = (step.size, step.number)
        self.inputs[key].fill_(0.5)
        self.inputs[key][: len(hidden)] = hidden
        step.update(_Skipping(self.graphs[key], step, self.skip))
        for out in self.attention[key]:
            out.fill_(torch.nan)  # what a renewal wrote must not be taken for a replay
        self.graphs[key].replay()
        return self.outputs[key]


@attrs.frozen
class _Skipping:
    """Renews every task but those of some layers."""

    graph: HostGraph
    step: CapturedStep
    skip: set[str]

    def capture(self, launch: object) -> object:
        raise AssertionError("a replay captures nothing")

    def update(self, handle: object, launch: object) -> None:
        if launch.__self__.layer not in self.skip:  # type: ignore[attr-defined]
            self.graph.update(handle, launch)  # type: ignore[arg-type]


def decode_batch(requests: Sequence[Request], query_len: int) -> AttentionBatch:
    """The requests with ``query_len`` new tokens each."""
    table = torch.zeros(len(requests), MAX_BLOCKS, dtype=torch.int32)
    for row, (_, blocks) in enumerate(requests):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return AttentionBatch.from_lengths(
        [query_len] * len(requests), [keys for keys, _ in requests], BLOCK, block_table=table
    )


def positions_of(requests: Sequence[Request], query_len: int) -> torch.Tensor:
    return torch.cat([torch.arange(keys - query_len, keys) for keys, _ in requests])

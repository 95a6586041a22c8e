"""DeepSeek-V4 attention modules of Hugging Face, and the same weights around our backend."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import torch
from latent_schedules import Chunk
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from ascend_attn_backends import (
    AscendDSACompressor,
    AscendDSAImpl,
    AscendDSAIndexerImpl,
    AscendDSAMetadata,
    AscendDSAMetadataBuilder,
    AttentionBatch,
    CompressorWeights,
    DsaCacheShape,
    DsaCompression,
    DsaTables,
)

HIDDEN, HEADS, KEY, INDEX, INDEX_HEADS, ROPE, TOP_K, WINDOW = 48, 4, 32, 32, 16, 16, 5, 11
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "head_dim": KEY,
    "q_lora_rank": 24,
    "partial_rotary_factor": ROPE / KEY,
    "sliding_window": WINDOW,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX,
    "index_topk": TOP_K,
    "num_hidden_layers": len(KINDS),
    "layer_types": list(KINDS),
    "vocab_size": 32,
    "attn_implementation": "eager",
}


@attrs.frozen(eq=False)
class Model:
    """One attention module of each kind, with random weights, norms, sinks and biases included."""

    config: DeepseekV4Config
    layers: list[Any]
    rotary: Any
    dtype: torch.dtype = torch.float32

    def half(self, dtype: torch.dtype) -> Model:
        """The same model with weights that ``dtype`` can hold, still in float32."""
        layers = copy.deepcopy(self.layers)
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if "sinks" not in name and "position_bias" not in name:
                    parameter.data = parameter.data.to(dtype).float()
        return attrs.evolve(self, layers=layers, dtype=dtype)

    @classmethod
    def random(cls, heavy_ratio: int = 8, seed: int = 0, **sizes: Any) -> Model:
        torch.manual_seed(seed)
        rates = dict(zip(KINDS[1:], (4, heavy_ratio), strict=True))
        config = DeepseekV4Config(**{**SIZES, "compress_rates": rates, **sizes})
        layers = [v4.DeepseekV4Attention(config, layer) for layer in range(len(KINDS))]
        with torch.no_grad():
            for layer in layers:
                for name, parameter in layer.named_parameters():
                    if "norm" in name:
                        parameter.normal_(1.0, 0.2)
                    elif "sinks" in name or "position_bias" in name:
                        parameter.normal_()
                    else:
                        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        return cls(config, layers, v4.DeepseekV4RotaryEmbedding(config))

    def compression(self, layer: int) -> DsaCompression | None:
        kind = KINDS[layer]
        if kind == KINDS[0]:
            return None
        top_k = self.config.index_topk if kind == KINDS[1] else None
        return DsaCompression(self.config.compress_rates[kind], top_k)

    def rotary_rows(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each ``[T, ROPE / 2]``, of a layer's rotation."""
        kind = self.layers[layer].rope_layer_type
        cos, sin = self.rotary(torch.zeros(1), positions[None], layer_type=kind)
        return cos[0], sin[0]


@torch.no_grad()
def theirs(model: Model, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Output of every layer for one whole sequence ``[length, HIDDEN]``, without a cache.

    A model in half precision stays in float32 with weights, hidden states, queries and keys that
    ``dtype`` can hold; its output is the attention result, ``[length, HEADS, KEY]``.
    """
    if model.dtype == torch.float32:
        return _outputs(model, hidden)
    eager, results = v4.eager_attention_forward, []

    def rounding(module: Any, *tensors: torch.Tensor, **options: Any) -> Any:
        halves = (rows.to(model.dtype).float() for rows in tensors[:3])
        found = eager(module, *halves, *tensors[3:], **options)
        results.append(found[0][0])
        return found

    with mock.patch.object(v4, "eager_attention_forward", rounding):
        _outputs(model, hidden)
    return results


def _outputs(model: Model, hidden: torch.Tensor) -> list[torch.Tensor]:
    positions = torch.arange(len(hidden))
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < model.config.sliding_window)
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    return [
        module(
            hidden[None],
            position_embeddings={
                kind: model.rotary(hidden[None], positions[None], layer_type=kind)
                for kind in ("main", "compress")
            },
            position_ids=positions[None],
            attention_mask=mask,
        )[0][0]
        for module in model.layers
    ]


@torch.no_grad()
def undecided(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """``[length]`` bool, tokens whose last chosen and first left key score nearly the same.

    Which of the two is taken then depends on rounding, and either is right.
    """
    indexer, scores = model.layers[1].compressor.indexer, []
    with indexer.scorer.register_forward_hook(lambda *call: scores.append(call[2][0])):
        _outputs(model, hidden)
    length, keys = scores[0].shape
    if keys <= indexer.index_topk:
        return torch.zeros(length, dtype=torch.bool)
    seen = torch.arange(keys) < ((torch.arange(length) + 1) // indexer.compress_rate)[:, None]
    best = scores[0].masked_fill(~seen, -torch.inf).sort(-1, descending=True).values
    return best[:, indexer.index_topk - 1] - best[:, indexer.index_topk] < 1e-5


def rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotation of ``[T, N, D]`` rows by Hugging Face's function."""
    turned: torch.Tensor = v4.apply_rotary_pos_emb(
        rows[None], cos[None], sin[None], unsqueeze_dim=2
    )
    return turned[0]


def compressor_of(
    module: Any, compression: DsaCompression, dtype: torch.dtype = torch.float32
) -> AscendDSACompressor:
    """Our compressor with the weights of theirs (of a layer, or of an indexer)."""
    weights = CompressorWeights(
        module.kv_proj.weight.to(dtype),
        module.gate_proj.weight.to(dtype),
        module.position_bias,
        module.kv_norm.weight.to(dtype),
    )
    eps = module.kv_norm.variance_epsilon
    return AscendDSACompressor(compression, weights, module.head_dim, ROPE, eps)


@attrs.define(eq=False, slots=False)
class Layer:
    """The projections of one module around our backend, with paged caches.

    Unwritten rows are NaN, so that any read shows. The attributes after ``unwritten`` are what
    negative controls break.
    """

    model: Model
    number: int
    block_size: int
    num_blocks: int
    num_spec_tokens: int = 8
    unwritten: float = torch.nan
    window_change: int = 0
    ignore_choice: bool = False
    first_choice: bool = False
    position_change: int = 0
    without_sinks: bool = False
    change: Callable[[AscendDSAMetadata], AscendDSAMetadata] = lambda metadata: metadata

    def __attrs_post_init__(self) -> None:
        self.module, self.compression = self.model.layers[self.number], self._compression()
        self.caches = DsaCacheShape.of_layer(
            self.num_blocks,
            self.block_size,
            self.compression,
            state_block_size=STATE_BLOCK,
            key_size=KEY,
            index_size=INDEX,
        )
        paged = {"window": self.caches.window}
        states = {}
        if self.caches.compressed is not None:
            paged["compressed"], states["state"] = self.caches.compressed, self.caches.state
        if self.caches.index is not None:
            paged["index"], states["index_state"] = self.caches.index, self.caches.index_state
        self.memory = {
            name: shape.allocate(self.model.dtype).fill_(self.unwritten)
            for name, shape in paged.items()
        }
        self.states = {name: shape.allocate() for name, shape in states.items()}
        for pair in self.states.values():
            for state in pair:
                state.fill_(self.unwritten)
        self.builder = AscendDSAMetadataBuilder(
            self.block_size,
            num_heads=HEADS,
            compression=self.compression,
            window=self.model.config.sliding_window + self.window_change,
            head_size=KEY,
            compressed_block_size=self.block_size,
            state_block_size=STATE_BLOCK,
            num_spec_tokens=self.num_spec_tokens,
        )
        sinks = None if self.without_sinks else self.module.sinks.detach()
        self.impl = AscendDSAImpl(HEADS, self.module.scaling, self.compression, sinks, KEY)

    def _compression(self) -> DsaCompression | None:
        return self.model.compression(self.number)

    @torch.no_grad()
    def step(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        tables: DsaTables | None,
    ) -> torch.Tensor:
        """Output for the tokens of one step."""
        metadata = self.change(self.builder.build(batch, tables))
        cos, sin = self.model.rotary_rows(self.number, positions)
        module, rows = self.module, len(hidden)
        residual = module.q_a_norm(module.q_a_proj(hidden))
        query = module.q_b_norm(module.q_b_proj(residual).view(rows, HEADS, KEY))
        query = rotated(query, cos, sin)
        kv = rotated(module.kv_norm(module.kv_proj(hidden))[:, None], cos, sin)[:, 0]
        query, kv = query.to(self.model.dtype), kv.to(self.model.dtype)
        self.impl.write_kv(kv, self.memory["window"], metadata.slot_mapping)
        self.compress(hidden, metadata)
        chosen = self.choose(hidden, residual, (cos, sin), metadata)
        output = torch.full((rows, HEADS, KEY), torch.nan, dtype=self.model.dtype)
        self.impl.forward(
            query,
            self.memory["window"],
            metadata,
            output,
            self.memory.get("compressed"),
            chosen,
        )
        if self.model.dtype != torch.float32:
            return output
        output = rotated(output, cos, -sin)
        grouped = output.reshape(1, rows, self.model.config.o_groups, -1)
        result: torch.Tensor = module.o_b_proj(module.o_a_proj(grouped).flatten(2))[0]
        return result

    def compress(self, hidden: torch.Tensor, metadata: AscendDSAMetadata) -> None:
        if self.compression is None or metadata.compressed is None:
            return
        positions = metadata.compressed.compressor.key_positions + self.position_change
        rotary = tuple(
            part.repeat_interleave(2, -1).contiguous()
            for part in self.model.rotary_rows(self.number, positions)
        )
        modules = {"compressed": ("state", self.module.compressor)}
        if self.compression.overlap:
            modules["index"] = ("index_state", self.module.compressor.indexer)
        for name, (state, module) in modules.items():
            compressor = compressor_of(module, self.compression, self.model.dtype)
            keys = compressor.forward(
                hidden.to(self.model.dtype), self.states[state], rotary, metadata
            )
            compressor.write_kv(keys, self.memory[name], metadata)

    def choose(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        metadata: AscendDSAMetadata,
    ) -> torch.Tensor | None:
        if self.compression is None or not self.compression.overlap:
            return None
        theirs = self.module.compressor.indexer
        indexer = AscendDSAIndexerImpl(INDEX_HEADS, self.compression, INDEX)
        query = theirs.q_b_proj(residual).view(len(hidden), INDEX_HEADS, INDEX)
        weights = indexer.scaled_weights(theirs.scorer.weights_proj(hidden))
        query, weights = (rows.to(self.model.dtype) for rows in (rotated(query, *rotary), weights))
        chosen = indexer.forward(query, weights, self.memory["index"], metadata)
        if self.first_choice:
            first = torch.arange(chosen.shape[-1], dtype=torch.int32)
            return torch.where(chosen >= 0, first, chosen)
        return torch.full_like(chosen, -1) if self.ignore_choice else chosen


STATE_BLOCK = 16
Tables = tuple[torch.Tensor, DsaTables | None]
"""Blocks of the window, and of the compressed keys and states."""


@attrs.frozen(eq=False)
class Pools:
    """Random blocks of each kind of cache for whole requests, the same in every step."""

    block_size: int
    longest: int
    requests: int
    generator: torch.Generator

    def table(self, tokens: int, first: int = 0) -> torch.Tensor:
        """``[requests, blocks]`` int32 for the longest request, ids from ``first`` on."""
        width = max(-(-self.longest // tokens), 1)
        order = torch.randperm(self.requests * width, generator=self.generator) + first
        return order.view(self.requests, width).int()

    def tables(self, compression: DsaCompression | None) -> DsaTables | None:
        if compression is None:
            return None
        state = self.table(STATE_BLOCK, first=1)
        return DsaTables(compressed=self.table(self.block_size * compression.ratio), state=state)

    def every_step(self, layers: Sequence[Layer]) -> Callable[..., Tables]:
        window = self.table(self.block_size)
        found: dict[int, Tables] = {
            layer.number: (window, self.tables(layer.compression)) for layer in layers
        }
        return lambda layer, starts, ends: found[layer.number]


def run(
    model: Model,
    schedule: Sequence[Sequence[Chunk]],
    seed: int = 0,
    *,
    block_size: int = 16,
    layers: Sequence[int] = range(len(KINDS)),
    allocator: Callable[..., Tables] | None = None,
    num_blocks: int = 0,
    **changes: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(ours, theirs): per layer, the outputs of all kept tokens of all requests.

    ``allocator(layer, starts, ends)`` gives the tables of a step with these tokens of each request,
    in pools of at least ``num_blocks``.
    """
    generator = torch.Generator().manual_seed(seed)
    requests = len(schedule[0])
    totals = [sum(step[row][0] for step in schedule) for row in range(requests)]
    hidden = [torch.randn(total, HIDDEN, generator=generator) for total in totals]
    hidden = [rows.to(model.dtype).float() for rows in hidden]
    longest = max(t + max(step[r][1] for step in schedule) for r, t in enumerate(totals))
    pools = Pools(block_size, longest, requests, generator)
    most = 1 + requests * max(-(-longest // min(block_size, STATE_BLOCK)), 1)
    most = max(most, num_blocks)
    ours = [Layer(model, number, block_size, most, **changes) for number in layers]
    allocator = allocator or pools.every_step(ours)
    done = [0] * requests
    parts: list[list[list[torch.Tensor]]] = [[[] for _ in range(requests)] for _ in ours]
    for step in schedule:
        lengths = [kept + rejected for kept, rejected in step]
        if not any(lengths):
            continue
        tokens = []
        for row, (kept, rejected) in enumerate(step):
            tokens.append(hidden[row][done[row] : done[row] + kept])
            tokens.append(torch.randn(rejected, HIDDEN, generator=generator))
        ends = [d + n for d, n in zip(done, lengths, strict=True)]
        positions = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, lengths, strict=True)])
        for place, layer in enumerate(ours):
            window, tables = allocator(layer, done, ends)
            batch = AttentionBatch.from_lengths(lengths, ends, block_size, block_table=window)
            output = layer.step(torch.cat(tokens), positions, batch, tables)
            for row, rows in enumerate(output.split(lengths)):
                parts[place][row].append(rows[: step[row][0]])
        done = [d + kept for d, (kept, _) in zip(done, step, strict=True)]
    expected = [theirs(model, rows) if len(rows) else [] for rows in hidden]
    found = [torch.cat([torch.cat(rows) for rows in layer if rows]) for layer in parts]
    wanted = [torch.cat([outputs[layer] for outputs in expected if outputs]) for layer in layers]
    open_rows = torch.cat([undecided(model, rows) for rows in hidden if len(rows)])
    assert open_rows.sum() <= max(1, 0.02 * len(open_rows))
    return [rows[~open_rows] for rows in found], [rows[~open_rows] for rows in wanted]

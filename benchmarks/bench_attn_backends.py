"""Host preparation of ascend-attn-backends: ``python bench_attn_backends.py [--json FILE]``.

Every ratio is between two sides of one run, taken in turns; nothing here is a claim about an NPU.

* one draft step (64 requests, 5 layers, k = 7): metadata once and a plan per geometry, against the
  same backend rebuilding metadata for each of the k + 1 tokens and a plan for each layer of each
* metadata for 256 requests: growth with layers, and with requests
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from ratios import Ratio, medians, options, report

from ascend_attn_backends import (
    AscendAttentionMetadataBuilder,
    AscendFlashAttentionImpl,
    AscendFlashAttentionMetadataBuilder,
    AttentionBatch,
    PlanCache,
)

REQUESTS, LAYERS, K, BLOCK = 64, 5, 7, 128
HEADS, KV_HEADS, SIZE = 32, 8, 128
MANY_REQUESTS, MANY_LAYERS = 256, 80
# Nothing is computed here, so neither has values that matter, nor the cache all its blocks.
QUERIES = torch.zeros(REQUESTS * (K + 1), HEADS, SIZE, dtype=torch.bfloat16)
CACHE = torch.zeros(1, BLOCK, KV_HEADS, SIZE, dtype=torch.bfloat16).transpose(1, 2)


def decode_lengths(requests: int) -> list[int]:
    """Key counts from 500 to 3,500."""
    return [500 + 3000 * row // requests for row in range(requests)]


def step(requests: int, query_len: int, *, causal: bool) -> AttentionBatch:
    """A step in which every request computes ``query_len`` tokens."""
    return AttentionBatch.from_lengths(
        [query_len] * requests,
        [keys + query_len for keys in decode_lengths(requests)],
        BLOCK,
        causal=causal,
    )


def draft_layers() -> list[AscendFlashAttentionImpl]:
    return [AscendFlashAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS) for _ in range(LAYERS)]


def prepare(
    layers: list[AscendFlashAttentionImpl], batch: AttentionBatch, plans: PlanCache
) -> None:
    """Everything before the operator calls of a step: metadata, each layer's checked plan."""
    metadata = AscendFlashAttentionMetadataBuilder(BLOCK, plans=plans).build(batch)
    for layer in layers:
        layer._call(QUERIES[: batch.num_tokens], CACHE, CACHE, metadata)


def rebuild(
    layers: list[AscendFlashAttentionImpl], batches: list[AttentionBatch]
) -> list[PlanCache]:
    """The same work for each token and each layer anew: nothing is shared."""
    caches = []
    for batch in batches:
        for layer in layers:
            caches.append(PlanCache())
            prepare([layer], batch, caches[-1])
    return caches


def draft_step_ratios() -> list[Ratio]:
    layers = draft_layers()
    together = step(REQUESTS, K + 1, causal=False)
    one_by_one = [step(REQUESTS, 1, causal=False) for _ in range(K + 1)]
    shared = PlanCache()
    prepare(layers, together, shared)
    built = sum(cache.builds for cache in rebuild(layers, one_by_one))
    found = medians(
        {
            "rebuilt": lambda: rebuild(layers, one_by_one),
            "shared": lambda: prepare(layers, together, PlanCache()),
        },
        5,
    )
    label = f"draft step, {REQUESTS} requests, {LAYERS} layers, k = {K}: rebuilding / plan cache"
    return [
        Ratio(f"{label}, time", found["rebuilt"] / found["shared"], ">= 10", found),
        Ratio(
            f"{label}, plans built",
            built / shared.builds,
            ">= 40",
            {"rebuilt": float(built), "shared": float(shared.builds)},
        ),
    ]


def growth(name: str, build: Callable[[AttentionBatch], Any], per_layer: Any) -> list[Ratio]:
    """Growth of a step's metadata with layers and with requests."""
    batches = {count: step(count, 1, causal=True) for count in (1, MANY_REQUESTS)}

    def layered(count: int) -> None:
        metadata = build(batches[MANY_REQUESTS])
        for _ in range(count):
            per_layer(metadata)

    found = medians(
        {
            "1 request": lambda: build(batches[1]),
            f"{MANY_REQUESTS} requests": lambda: build(batches[MANY_REQUESTS]),
            "1 layer": lambda: layered(1),
            f"{MANY_LAYERS} layers": lambda: layered(MANY_LAYERS),
        },
        31,
    )
    layers = found[f"{MANY_LAYERS} layers"] / found["1 layer"]
    requests = found[f"{MANY_REQUESTS} requests"] / found["1 request"]
    many = f"metadata of {MANY_REQUESTS} requests, {name}"
    return [
        Ratio(f"{many}: {MANY_LAYERS} layers / 1 layer", layers, "<= 1.5", found),
        Ratio(f"{many} / of 1 request", requests, f"<= {MANY_REQUESTS // 16}", found),
    ]


def metadata_ratios() -> list[Ratio]:
    layer, plans = draft_layers()[0], PlanCache()
    standard = AscendAttentionMetadataBuilder(BLOCK)
    draft = AscendFlashAttentionMetadataBuilder(BLOCK, plans=plans)

    def with_plan(batch: AttentionBatch) -> Any:
        metadata = draft.build(batch)
        plans.plan(metadata.lengths, layer.geometry(metadata))
        return metadata

    def reuse(metadata: Any) -> None:
        plans.plan(metadata.lengths, layer.geometry(metadata))

    return [
        *growth("standard", standard.build, lambda metadata: metadata.launches),
        *growth("draft_flash with its plan", with_plan, reuse),
    ]


def measure() -> list[Ratio]:
    """All ratios."""
    return [*draft_step_ratios(), *metadata_ratios()]


def main() -> int:
    parsed = options(__doc__).parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        return report(measure(), parsed.json)


if __name__ == "__main__":
    sys.exit(main())

"""Sparse latent attention against dense latent attention: ``python bench_sfa.py [--json FILE]``.

One token is decoded over 131,072 cached tokens with 64 heads, as GLM-5 has them on one rank. Both
sides attend over the same latents in float32 and run in turns in one process, on one CPU thread:
two threads of a busy machine wait for each other, which hurts the side with the smaller kernels.
Nothing here is a claim about an NPU.

* sparse: the layer's ``forward`` over a shuffled paged cache and 2,048 chosen keys
* dense: absorbed attention over all keys in plain torch, keys already gathered and contiguous
* sparse with its indexer: the same after choosing the keys among all with 32 index heads
"""

from __future__ import annotations

import sys

import attrs
import torch
from ratios import Ratio, medians, options, report

from ascend_attn_backends import (
    AscendSFABackend,
    AscendSFAImpl,
    AscendSFAIndexerImpl,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
)

KEYS, BLOCK, TOP_K = 131_072, 128, 2_048
HEADS, INDEX_HEADS = 64, 32
SCALE = 256**-0.5


@attrs.frozen(eq=False)
class Decode:
    """One request with its caches and the queries of its newest token.

    Attributes:
        latent: ``[num_blocks, 1, block_size, 512]``.
        rope: ``[num_blocks, 1, block_size, 64]``.
        index: ``[num_blocks, 1, block_size, 128]``.
        query: ``[1, N, 512]`` and ``[1, N, 64]``.
        index_query: ``[1, index heads, 128]``.
        weights: ``[1, index heads]``.
        batch: The step.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    index: torch.Tensor
    query: tuple[torch.Tensor, torch.Tensor]
    index_query: torch.Tensor
    weights: torch.Tensor
    batch: AttentionBatch

    @classmethod
    def random(cls) -> Decode:
        shape = AscendSFABackend.cache_shape(KEYS // BLOCK, BLOCK)
        assert shape.index is not None
        kinds = (shape.latent, shape.rope, shape.index)
        latent, rope, index = (kind.allocate(torch.float32).normal_() for kind in kinds)
        table = torch.randperm(KEYS // BLOCK)[None].int()
        return cls(
            latent,
            rope,
            index,
            (torch.randn(1, HEADS, 512), torch.randn(1, HEADS, 64)),
            torch.randn(1, INDEX_HEADS, 128),
            torch.randn(1, INDEX_HEADS),
            AttentionBatch.from_lengths([1], [KEYS], BLOCK, block_table=table),
        )

    def keys(self) -> torch.Tensor:
        """``[KEYS, 576]`` in the order of the request's positions, contiguous."""
        table = self.batch.block_table[0].long()
        parts = [cache[table, 0].flatten(0, 1) for cache in (self.latent, self.rope)]
        return torch.cat(parts, -1)


def dense(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Absorbed attention of queries ``[N, 576]`` over all keys ``[L, 576]``."""
    return torch.softmax(SCALE * query @ keys.T, -1) @ keys[:, :512]


def measure() -> list[Ratio]:
    """Both ratios, after both sides agreed on the same keys."""
    decode = Decode.random()
    impl, indexer = AscendSFAImpl(HEADS, SCALE), AscendSFAIndexerImpl(INDEX_HEADS, TOP_K)
    metadata = AscendSFAMetadataBuilder(BLOCK).build(decode.batch)
    index_metadata = AscendSFAIndexerMetadataBuilder(BLOCK).build(decode.batch)
    output = torch.empty_like(decode.query[0])
    keys, query = decode.keys(), torch.cat(decode.query, -1)[0]

    def choose() -> torch.Tensor:
        return indexer.forward(decode.index_query, decode.weights, decode.index, index_metadata)

    chosen = choose()

    def sparse(entries: torch.Tensor = chosen) -> torch.Tensor:
        return impl.forward(*decode.query, decode.latent, decode.rope, entries, metadata, output)

    torch.testing.assert_close(sparse()[0], dense(query, keys[chosen[0, 0].long()]))
    found = medians(
        {
            "dense ms": lambda: dense(query, keys),
            "sparse ms": sparse,
            "with indexer ms": lambda: sparse(choose()),
        },
        repeats=5,
    )
    label = f"SFA decode, {KEYS:,} keys, top-k {TOP_K:,}, {HEADS} heads: dense MLA / "
    return [
        Ratio(f"{label}SFA", found["dense ms"] / found["sparse ms"], ">= 5", found),
        Ratio(
            f"{label}SFA with its indexer",
            found["dense ms"] / found["with indexer ms"],
            ">= 1",
            found,
        ),
    ]


def main() -> int:
    parsed = options(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        return report(measure(), parsed.json)


if __name__ == "__main__":
    sys.exit(main())

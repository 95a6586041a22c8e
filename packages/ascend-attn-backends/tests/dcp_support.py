"""Ranks that share the keys of dense latent attention, in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from latent_support import SCALE, LatentScenario, PoisonedCalls

from ascend_attn_backends import (
    AscendMlaDCPImpl,
    AscendMlaDCPMetadataBuilder,
    AttentionBatch,
    ContextShard,
    LatentRankStep,
    ThreadDCPGroup,
    run_ranks,
    sharded_batch,
)

# (query_lens, seq_lens) of a step: fewer keys than ranks, a chunk of a prompt, k = 3 drafts, mixed.
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "short": ([1, 1, 1], [1, 2, 3]),
    "decode": ([1, 1], [2, 9]),
    "chunk": ([11, 5], [40, 5]),
    "verify 3": ([4, 4], [4, 33]),
    "mixed": ([4, 1, 3, 0, 17], [21, 9, 3, 6, 17]),
}


def batch_on(scenario: LatentScenario, shard: ContextShard) -> AttentionBatch:
    return sharded_batch(
        scenario.query_lens,
        scenario.seq_lens,
        scenario.block_size,
        shard,
        causal=scenario.causal,
    )


def rank_step(
    scenario: LatentScenario,
    shard: ContextShard,
    batch: AttentionBatch | None = None,
    written: ContextShard | None = None,
) -> LatentRankStep:
    """What a rank brings when its cache holds its share of all keys.

    Args:
        scenario: Requests with their history.
        shard: The rank.
        batch: Its batch, by default without padding.
        written: The share that was written; a negative control gives another one.
    """
    batch = batch or batch_on(scenario, shard)
    whole = sharded_batch(
        scenario.seq_lens, scenario.seq_lens, scenario.block_size, written or shard
    )
    impl = AscendMlaDCPImpl(scenario.heads // shard.size, SCALE)
    caches = scenario.caches(int(whole.block_table.max()) + 2)
    rows = [torch.cat(history) for history in (scenario.latents, scenario.ropes)]
    impl.write_kv(*rows, *caches, whole.slot_mapping)
    heads = slice(shard.rank * impl.num_heads, (shard.rank + 1) * impl.num_heads)
    tail = batch.num_padded_tokens
    new = [
        torch.cat([part, part.new_full((tail, *part.shape[1:]), math.nan)])
        for part in (
            scenario.q_nope[:, heads],
            scenario.q_pe[:, heads],
            scenario.new_rows(scenario.latents),
            scenario.new_rows(scenario.ropes),
        )
    ]
    metadata = AscendMlaDCPMetadataBuilder(scenario.block_size, shard=shard).build(batch)
    return LatentRankStep(
        q_nope=new[0],
        q_pe=new[1],
        latent=new[2],
        rope=new[3],
        latent_cache=caches[0],
        rope_cache=caches[1],
        metadata=metadata,
    )


class PoisonedDCPImpl(PoisonedCalls, AscendMlaDCPImpl):
    """The layer over an operator that writes NaN and a finite lse for requests without keys."""


def run_steps(
    scenario: LatentScenario,
    steps: Sequence[LatentRankStep],
    layer: type[AscendMlaDCPImpl] = AscendMlaDCPImpl,
) -> torch.Tensor:
    """Outputs of all ranks side by side: [num_token_rows, N, 512]."""

    def forward(group: ThreadDCPGroup) -> torch.Tensor:
        step, impl = steps[group.rank], layer(scenario.heads // group.size, SCALE, group)
        output = torch.full_like(step.q_nope, math.nan)
        assert impl.forward_mqa(step, output) is output
        return output

    return torch.cat(run_ranks(len(steps), forward), 1)


def run_shards(scenario: LatentScenario, size: int, interleave: int = 1) -> torch.Tensor:
    """The step on ``size`` ranks of one process."""
    shards = [ContextShard(rank=rank, size=size, interleave=interleave) for rank in range(size)]
    return run_steps(scenario, [rank_step(scenario, shard) for shard in shards])

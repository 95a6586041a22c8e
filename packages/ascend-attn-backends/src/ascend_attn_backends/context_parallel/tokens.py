"""A step with every token as a request of its own: shards need no mask then."""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..token_keys import token_keys
from ..transfer import copy_to_device
from .shard import ContextShard


def per_token_batch(batch: AttentionBatch, shard: ContextShard) -> AttentionBatch:
    """The batch of one rank in which each token has the keys that it may see on this rank.

    Where a request has several tokens, their bounds on a shard follow no mask of the operators, but
    as requests of their own they need none. The sparse backends build their metadata from this
    batch. It also serves an engine such as vLLM that gathers the heads and merges the ranks itself
    and wants of a backend the part of one rank: out and lse over its own keys, for all tokens. Any
    backend's partial forward on metadata of this batch gives that part.

    The cost: a row of the block table per token, and with operators that read all keys of a request
    these are read once per token. ``fused_infer_attention_score`` takes 4096 requests in a call
    (op-plugin docs), so there it suits decode and verification, not long prompts.

    Args:
        batch: Lengths of all ranks together, block table and slots of this rank.
        shard: The rank.

    Returns:
        A batch of ``num_tokens`` requests with the same slots and padding tokens. Nothing is read
        from the device; there are host lengths where the batch has them. A token whose keys are all
        on other ranks has length 0.
    """
    tokens = batch.num_tokens
    rows, visible = visible_keys(batch, batch.query_start_loc, batch.seq_lens, batch.causal)
    local = shard.local_counts(visible).int()
    ends = torch.arange(tokens + 1, dtype=torch.int32)
    longest = attrs.evolve(shard, rank=0).local_counts(torch.tensor(batch.max_seq_len))
    return attrs.evolve(
        batch,
        query_start_loc=copy_to_device(ends, batch.device),
        query_start_loc_cpu=ends,
        seq_lens=local,
        seq_lens_cpu=_host_lengths(batch, shard),
        seq_lens_cpu_upper_bound=None,
        block_table=batch.block_table.index_select(0, rows),
        num_reqs=tokens,
        num_padded_reqs=0,
        max_query_len=min(tokens, 1),
        max_seq_len=int(longest),
        causal=False,
        causal_cpu=None,
        is_prefilling=None,
        has_shard_lengths=True,
    )


def _host_lengths(batch: AttentionBatch, shard: ContextShard) -> torch.Tensor | None:
    starts, keys = batch.query_start_loc_cpu, batch.seq_lens_cpu
    causal = batch.causal if isinstance(batch.causal, bool) else batch.causal_cpu
    if starts is None or keys is None or causal is None:
        return None
    return shard.local_counts(visible_keys(batch, starts, keys, causal)[1]).int()


def visible_keys(
    batch: AttentionBatch,
    starts: torch.Tensor,
    keys: torch.Tensor,
    causal: bool | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request of each token, and how many keys of all ranks it sees; on the device of ``keys``.

    Args:
        batch: For its counts.
        starts: ``[num_rows + 1]`` query starts.
        keys: ``[num_rows]`` keys.
        causal: One value, or ``[num_rows]``.

    Returns:
        ``[num_tokens]`` int64 rows, and ``[num_tokens]`` int64 counts: 0 for a token that repaired
        starts give to no request.
    """
    found = token_keys(batch, starts, keys, causal)
    return found.rows, found.ends

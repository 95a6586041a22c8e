"""A step with every token as a request of its own, for engines that merge by themselves."""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..standard.builder import covered_starts, host_key_counts
from ..transfer import copy_to_device
from .shard import ContextShard


def per_token_batch(batch: AttentionBatch, shard: ContextShard) -> AttentionBatch:
    """The batch of one rank in which each token has the keys that it may see on this rank.

    An engine such as vLLM gathers the heads and merges the ranks itself, and wants of a backend
    the part of one rank: out and lse over its own keys, for all tokens. Where a request has several
    tokens their bounds on a shard follow no mask of the operators, but as requests of their own
    they need none. Any backend's partial forward on metadata of this batch gives that part. The
    cost: keys are read once per token, and products take 4096 requests in a call (op-plugin docs
    npu_fused_infer_attention_score), so it suits decode and verification, not long prompts.

    Args:
        batch: Lengths of all ranks together, block table and slots of this rank.
        shard: The rank.

    Returns:
        A batch of ``num_tokens`` requests with the same slots and padding tokens; lengths come from
        host copies where there are some. A token whose keys are all on other ranks has length 0,
        which :meth:`AttentionBatch.validate` would not take for a whole request.
    """
    starts = torch.tensor(covered_starts(batch))
    keys = torch.tensor(host_key_counts(batch), dtype=torch.int64)
    causal = torch.tensor(batch.host_causal()[: batch.num_reqs], dtype=torch.bool)
    lens = starts.diff()
    rows = torch.repeat_interleave(torch.arange(batch.num_reqs), lens)
    tokens = int(starts[-1])
    visible = torch.arange(tokens) - starts[rows] + (keys - lens)[rows] + 1
    visible = torch.where(causal[rows], visible.clamp(min=0), keys[rows])
    local = shard.local_counts(visible).int()
    ends = torch.arange(tokens + 1, dtype=torch.int32)
    return attrs.evolve(
        batch,
        query_start_loc=copy_to_device(ends, batch.device),
        query_start_loc_cpu=ends,
        seq_lens=copy_to_device(local, batch.device),
        seq_lens_cpu=local,
        block_table=batch.block_table.index_select(0, copy_to_device(rows, batch.device)),
        num_reqs=tokens,
        num_tokens=tokens,
        num_padded_reqs=0,
        num_padded_tokens=batch.num_token_rows - tokens,
        max_query_len=min(tokens, 1),
        max_seq_len=max(local.tolist(), default=0),
        causal=False,
        causal_cpu=None,
        is_prefilling=None,
    )

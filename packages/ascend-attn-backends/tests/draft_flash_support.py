"""The draft backend over the scenarios of attn_backends_support."""

from __future__ import annotations

import math

import attrs
import torch
from attn_backends_support import Scenario, padded

from ascend_attn_backends import (
    AscendFlashAttentionImpl,
    AscendFlashAttentionMetadata,
    AscendFlashAttentionMetadataBuilder,
    AttentionBatch,
)


def device_only(batch: AttentionBatch) -> AttentionBatch:
    """The batch without its host copies."""
    return attrs.evolve(batch, query_start_loc_cpu=None, seq_lens_cpu=None, causal_cpu=None)


def layer_of(scenario: Scenario) -> AscendFlashAttentionImpl:
    return AscendFlashAttentionImpl(
        scenario.heads, scenario.head_size, scenario.scale, scenario.kv_heads, scenario.window
    )


def run_draft(
    scenario: Scenario,
    batch: AttentionBatch | None = None,
    *,
    builder: AscendFlashAttentionMetadataBuilder | None = None,
    num_rejected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write this step's keys and values, then attend; rows of padding included."""
    batch = device_only(batch or scenario.batch())
    builder = builder or AscendFlashAttentionMetadataBuilder(scenario.block_size)
    return run_layer(scenario, builder.build(batch, num_rejected), batch.num_token_rows)


def run_layer(
    scenario: Scenario, metadata: AscendFlashAttentionMetadata, rows: int
) -> torch.Tensor:
    layer, caches = layer_of(scenario), (scenario.key_cache, scenario.value_cache)
    layer.write_kv(
        padded(scenario.new_tokens(scenario.keys), rows),
        padded(scenario.new_tokens(scenario.values), rows),
        *caches,
        metadata.slot_mapping,
    )
    query = padded(scenario.query, rows)
    output = torch.full_like(query, math.nan)
    assert layer.forward(query, *caches, metadata, output) is output
    return output

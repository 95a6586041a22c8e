"""The FA3 backend over the scenarios of attn_backends_support, and a stand-in for its package."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import attrs
import torch
from attn_backends_support import Scenario, dense_request, padded

from ascend_attn_backends import AscendFAImpl, AscendFAMetadataBuilder, AttentionBatch


def layer_of(scenario: Scenario, **options: Any) -> AscendFAImpl:
    return AscendFAImpl(
        scenario.heads, scenario.head_size, scenario.scale, scenario.kv_heads, **options
    )


def run_fa3(
    scenario: Scenario, batch: AttentionBatch | None = None, **options: Any
) -> torch.Tensor:
    """Write this step's keys and values, then attend; rows of padding included."""
    batch = batch or scenario.batch()
    metadata = AscendFAMetadataBuilder(scenario.block_size).build(batch)
    layer, rows = layer_of(scenario, **options), batch.num_token_rows
    caches = (scenario.key_cache, scenario.value_cache)
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


@attrs.define(eq=False)
class StandIn:
    """flash_attn_with_kvcache as its documents describe it, dense and in float64.

    It addresses pages as the kernels do: from the storage of the cache and the page size alone.
    """

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = attrs.field(factory=list)

    def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((args, kwargs))
        query, keys, values = args
        starts = kwargs["cu_seqlens_q"].tolist()
        out = torch.empty_like(query)
        for row, length in enumerate(kwargs["cache_seqlens"].tolist()):
            tokens = slice(starts[row], starts[row + 1])
            own = [self.rows(cache, kwargs["page_table"][row], length) for cache in (keys, values)]
            out[tokens] = dense_request(
                query[tokens],
                *own,
                scale=kwargs["softmax_scale"],
                causal=kwargs["causal"],
                window=None,
            ).to(query.dtype)
        return out

    @staticmethod
    def rows(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        _, size, heads, width = cache.shape
        page = size * heads * width
        strides = (page, heads * width, width, 1)
        pages = int(table.max()) + 1
        whole = cache.as_strided((pages, size, heads, width), strides)
        needed = -(-length // size)
        return whole[table[:needed].long()].flatten(0, 1)[:length]


@contextmanager
def stand_in(name: str = "flash_attn_npu_3") -> Iterator[StandIn]:
    """A module of this name that has the function, as long as the context is open."""
    double, module = StandIn(), ModuleType(name)
    module.flash_attn_with_kvcache = double.flash_attn_with_kvcache  # type: ignore[attr-defined]
    assert name not in sys.modules
    sys.modules[name] = module
    try:
        yield double
    finally:
        del sys.modules[name]

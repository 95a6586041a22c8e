"""Half precision: the vendor's comparison, and Hugging Face modules with a half precision cache.

The oracle is the eager module in float32 on weights that are bfloat16 numbers. Its queries, and its
keys and values by way of a cache, are rounded to bfloat16, as ours are. What is compared is the
attention result that the module hands to its output projection.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import torch
from sparse_hugging_face import Family

VENDOR = {torch.bfloat16: (2**-7, 1e-4), torch.float16: (0.005, 2.5e-5)}
"""rtol and atol of the vendor's comparison of attention operators (spec 01, section 6)."""

OUTLIERS, WORST = 0.005, 10.0
SMALLEST = 2**-14 / 0.005  # floor of the denominator of the largest relative error


def assert_vendor_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """At most 0.5 % of the elements outside the tolerance, none by a relative error of 10."""
    rtol, atol = VENDOR[dtype]
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected.double()).abs()
    outside = int((error > atol + rtol * expected.abs()).sum())
    assert outside <= OUTLIERS * error.numel(), f"{outside} of {error.numel()} elements outside"
    assert float((error / expected.abs().clamp(min=SMALLEST)).max()) < WORST


def rounded(found: Family, dtype: torch.dtype = torch.bfloat16) -> Family:
    """The family with weights that ``dtype`` can hold, still computing in float32."""
    with torch.no_grad():
        for layer in found.layers:
            for parameter in layer.parameters():
                parameter.copy_(parameter.to(dtype))
    return found


@attrs.frozen
class HalfCache:
    """What a module's cache returns, passed through half precision; it keeps nothing."""

    dtype: torch.dtype

    def update(self, *states: Any, **_: Any) -> tuple[torch.Tensor, ...]:
        return tuple(rows.to(self.dtype).to(rows.dtype) for rows in states[:2])

    def update_indexer(self, keys: torch.Tensor, _: int) -> torch.Tensor:
        return keys.to(self.dtype).to(keys.dtype)


@contextmanager
def half_queries(layer: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The eager attention function of the layer's own module, on rounded queries."""
    module = sys.modules[type(layer).__module__]
    eager = module.eager_attention_forward

    def rounding(layer: Any, query: torch.Tensor, *more: Any, **options: Any) -> Any:
        return eager(layer, query.to(dtype).to(query.dtype), *more, **options)

    with mock.patch.object(module, "eager_attention_forward", rounding):
        yield


@torch.no_grad()
def attention_results(
    found: Family, hidden: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Per layer, ``[length, N * Dv]`` attention results of one whole sequence."""
    positions = torch.arange(len(hidden))
    mask = torch.where(positions[:, None] >= positions, 0.0, torch.finfo(torch.float32).min)
    results: list[torch.Tensor] = []
    chosen: dict[str, torch.Tensor] = {}
    for layer in found.layers:
        hook = layer.o_proj.register_forward_pre_hook(
            lambda _, arguments: results.append(arguments[0][0])
        )
        with hook, half_queries(layer, dtype):
            outputs = layer(
                hidden[None],
                position_embeddings=found.rotary(hidden[None], positions[None]),
                attention_mask=mask[None, None],
                cache=HalfCache(dtype),
                **chosen,
            )
        if len(found.layers) > 1:
            chosen = {"prev_topk_indices": outputs[2]}
    return results

"""lightning_indexer and its quantised form: scores in float64, the best by a full sort."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..contracts import contract_check
from ..dispatch import kernel
from ._sequences import gather_keys, request_rows


@kernel("aclnnLightningIndexer", check=contract_check("lightning_indexer"), workspace=4096)
def lightning_indexer(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions (..., 1, k), -1 behind the allowed ones, and their scores where asked for."""
    keys = gather_keys(a.key, a.layout_key, a.actual_seq_lengths_key, a.block_table)
    wide = [key[:, 0].double() for key in keys]
    indices, values = _best(a, a.query.double(), wide)
    return indices, values if a.return_value else None


@kernel(
    "aclnnQuantLightningIndexer", check=contract_check("quant_lightning_indexer"), workspace=4096
)
def quant_lightning_indexer(a: Any) -> torch.Tensor:
    """The same for 8-bit queries and keys with one scale for each row and head."""
    query = a.query.double() * a.query_dequant_scale.double()[..., None]
    keys = gather_keys(a.key, a.layout_key, a.actual_seq_lengths_key, a.block_table)
    scales = gather_keys(
        a.key_dequant_scale[..., None], a.layout_key, a.actual_seq_lengths_key, a.block_table
    )
    wide = [(key.double() * scale.double())[:, 0] for key, scale in zip(keys, scales, strict=True)]
    return _best(a, query, wide)[0]


def _best(
    a: Any, query: torch.Tensor, keys: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*query.shape[:-2], 1, a.sparse_count)
    indices = torch.full(shape, -1, dtype=torch.int32)
    values = torch.full(shape, -math.inf, dtype=torch.float64)
    rows = request_rows(query.shape, a.layout_query, a.actual_seq_lengths_query)
    for key, places in zip(keys, rows, strict=True):
        for position, place in enumerate(places):
            seen = len(key) if a.sparse_mode == 0 else len(key) - len(places) + position + 1
            count = max(0, min(seen, a.sparse_count))
            scores = a.weights[place].double() @ (query[place] @ key[: max(seen, 0)].T).relu()
            order = scores.argsort(descending=True, stable=True)[:count]
            indices[place][0, :count] = order.int()
            values[place][0, :count] = scores[order]
    return indices, values

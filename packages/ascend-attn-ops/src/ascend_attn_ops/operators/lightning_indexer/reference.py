"""The formula row by row, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

import torch

from .._shared.reference_rows import real_rows, request_keys
from .arguments import LightningIndexerArguments as Args


def run_reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The best keys of every row; see the argument record."""
    s = a.sequences
    wide = torch.promote_types(a.query.dtype, torch.float32)
    query = a.query.reshape(s.tokens, *a.query.shape[-2:]).to(wide)
    weights = a.weights.reshape(s.tokens, -1).to(wide)
    keys = [request_keys(s, a.key, request).to(wide) for request in range(s.batch)]
    positions = torch.full((s.tokens, a.sparse_count), -1, dtype=torch.int32)
    values = torch.full((s.tokens, a.sparse_count), float("-inf"), dtype=wide)
    for row in real_rows(s, a.sparse_mode):
        key = keys[row.request][: max(row.limit, 0)]
        products = torch.relu(query[row.number] @ key.T)
        put_best(weights[row.number] @ products, positions[row.number], values[row.number])
    return shaped_choice(a.query, positions, values, values_wanted=a.return_value)


def put_best(scores: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write the best scores (J,) and their positions to the front of rows of k entries."""
    ordered, order = scores.sort(descending=True, stable=True)
    count = min(len(positions), len(order))
    positions[:count] = order[:count].int()
    values[:count] = ordered[:count]


def shaped_choice(
    query: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, *, values_wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values (T, k) in the operator's output shapes and dtypes."""
    shape = (*query.shape[:-2], 1, positions.shape[-1])
    if not values_wanted:
        return positions.view(shape), query.new_empty(0)
    return positions.view(shape), values.view(shape).to(query.dtype)

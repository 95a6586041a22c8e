"""The formula row by row, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .._shared.reference_rows import Row, real_rows, request_keys
from .arguments import LightningIndexerArguments as Args


def run_reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The best keys of every row; see the argument record."""
    s = a.sequences
    wide = torch.promote_types(a.query.dtype, torch.float32)
    positions, values = choose_row_by_row(
        real_rows(s, a.sparse_mode),
        a.query.reshape(s.tokens, *a.query.shape[-2:]).to(wide),
        a.weights.reshape(s.tokens, -1).to(wide),
        [request_keys(s, a.key, request).to(wide) for request in range(s.batch)],
        a.sparse_count,
    )
    return shaped_choice(
        a.query, positions, values, dtype=a.query.dtype, values_wanted=a.return_value
    )


def choose_row_by_row(
    rows: Iterable[Row],
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: Sequence[torch.Tensor],
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int32 and scores (T, k); -1 and -inf behind the keys that a row may see.

    Args:
        rows: The real rows and how many keys each may see.
        query: (T, N, D) float.
        weights: (T, N) float.
        keys: (Lk, D) float of each request.
        count: k.
    """
    positions = torch.full((len(query), count), -1, dtype=torch.int32)
    values = torch.full((len(query), count), float("-inf"), dtype=query.dtype)
    for row in rows:
        key = keys[row.request][: max(row.limit, 0)]
        scores = weights[row.number] @ torch.relu(query[row.number] @ key.T)
        ordered, order = scores.sort(descending=True, stable=True)
        found = min(count, len(key))
        positions[row.number, :found] = order[:found].int()
        values[row.number, :found] = ordered[:found]
    return positions, values


def shaped_choice(
    query: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    *,
    dtype: torch.dtype,
    values_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values (T, k) in the operators' output shapes and dtypes."""
    shape = (*query.shape[:-2], 1, positions.shape[-1])
    if not values_wanted:
        return positions.view(shape), values.new_empty(0, dtype=dtype)
    return positions.view(shape), values.view(shape).to(dtype)

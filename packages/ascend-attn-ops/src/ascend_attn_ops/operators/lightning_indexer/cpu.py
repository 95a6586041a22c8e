"""Fast host provider: requests together, rows and keys in tiles."""

from __future__ import annotations

import torch

from .._shared.sequences import visible_keys
from .._shared.top_keys import KeyScoring, best_keys
from .arguments import LightningIndexerArguments as Args
from .reference import shaped_choice


def run_cpu(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The best keys of all rows; see the argument record."""
    s = a.sequences
    rows, keys = s.query_rows(), s.key_rows()
    wide = torch.promote_types(a.query.dtype, torch.float32)
    scoring = KeyScoring(
        query=a.query.reshape(s.tokens, *a.query.shape[-2:]),
        weights=a.weights.reshape(s.tokens, -1),
        rows=rows,
        keys=keys,
        seen=visible_keys(rows, keys, causal=a.sparse_mode == 3),
        read=lambda request, position: keys.read(a.key, request, position).to(wide),
        count=a.sparse_count,
    )
    positions, values = best_keys(scoring)
    return shaped_choice(
        a.query, positions, values, dtype=a.query.dtype, values_wanted=a.return_value
    )

"""Output shape of the indexers."""

from __future__ import annotations

import torch

from ...operator import TensorMeta


def indices_meta(query: torch.Tensor, key: torch.Tensor, count: int) -> TensorMeta:
    """Indices (B, S1, N2, k) or (T1, N2, k); N2 is the number of key heads."""
    return TensorMeta((*query.shape[:-2], key.shape[-2], count), torch.int32)

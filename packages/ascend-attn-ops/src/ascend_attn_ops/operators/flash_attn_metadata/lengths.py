"""Effective lengths per request, read from the length tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .arguments import FlashAttnMetadataArguments as Args

Ints = npt.NDArray[np.int64]


def query_lengths(a: Args) -> Ints:
    """(B,) query tokens per request."""
    return _lengths(a.seqused_q, a.cu_seqlens_q, a.longest[0], a.requests)


def kv_lengths(a: Args) -> Ints:
    """(B,) keys per request."""
    return _lengths(a.seqused_kv, a.cu_seqlens_kv, a.longest[1], a.requests)


def _lengths(
    used: torch.Tensor | None, ends: torch.Tensor | None, longest: int, requests: int
) -> Ints:
    if used is not None:
        return _values(used)
    if ends is not None:
        return np.diff(_values(ends))
    return np.full(requests, longest, dtype=np.int64)


def _values(tensor: torch.Tensor) -> Ints:
    values: Any = tensor.detach().cpu().numpy()
    return np.asarray(values, dtype=np.int64)

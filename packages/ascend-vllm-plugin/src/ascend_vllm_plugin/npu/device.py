"""torch's module for NPUs."""

from __future__ import annotations

from typing import Any

import torch


def npu() -> Any:
    """`torch.npu`, which torch_npu adds when it is imported; unknown to torch's own types."""
    return torch.npu  # type: ignore[attr-defined]

"""Storage formats of NPU tensors."""

from __future__ import annotations

import importlib

import torch

ND, FRACTAL_NZ = 2, 29


def storage_format(tensor: torch.Tensor) -> int | None:
    """torch_npu's number of the format of a tensor; None off the NPU, where there is none."""
    if tensor.device.type != "npu":
        return None
    return int(importlib.import_module("torch_npu").get_npu_format(tensor))

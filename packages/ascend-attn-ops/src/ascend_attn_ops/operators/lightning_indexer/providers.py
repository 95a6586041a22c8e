"""The vendor call as data."""

from __future__ import annotations

from ...operator import NpuCall
from .._shared.vendor_call import call_like_record
from .arguments import LightningIndexerArguments as Args


def torch_npu_call(a: Args) -> NpuCall:
    """Query, key and weights by position, what differs from its default by name."""
    return call_like_record("npu_lightning_indexer", a)

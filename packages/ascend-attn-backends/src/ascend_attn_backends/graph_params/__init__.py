"""Captured decode steps: the memory that a graph reads, and what is renewed before each replay.

These are the only mutable buffers of this package. A captured graph reads them at the addresses
that they had at capture, so every attribute is frozen and every refresh writes in place.
"""

from .buffers import CacheGroup, DecodeBuffers
from .host_graph import HostGraph
from .params import FusedInferAttentionGraphParam, PagedAttentionGraphParam
from .registry import GraphParams, GraphParamSets
from .sizes import CaptureSizes
from .step import CapturedStep, GraphParam, GraphTasks

__all__ = [
    "CacheGroup",
    "CaptureSizes",
    "CapturedStep",
    "DecodeBuffers",
    "FusedInferAttentionGraphParam",
    "GraphParam",
    "GraphParamSets",
    "GraphParams",
    "GraphTasks",
    "HostGraph",
    "PagedAttentionGraphParam",
]

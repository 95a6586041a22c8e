"""Refusals that the backends over shared keys have in common, beside those of the table."""

from __future__ import annotations

from ascend_attn_ops import Refusal

from ..request import BackendRequest


def uneven_refusals(backend: str, request: BackendRequest) -> list[Refusal]:
    """A refusal where the ranks that share tokens cannot have equally many ranks for their heads.

    Args:
        backend: Name of the backend, for the rule.
        request: The layer.
    """
    ranks, tokens = request.context_parallel_size, request.prefill_context_parallel_size
    if ranks % tokens == 0:
        return []
    return [
        Refusal(
            rule=f"{backend}.context_parallel_size",
            parameter="context_parallel_size",
            found=str(ranks),
            allowed=f"a multiple of {tokens}, the ranks that share tokens",
            source=f"{backend} backend: each of these has equally many ranks for its heads",
        )
    ]


def gathered_heads(request: BackendRequest) -> int:
    """Query heads of a call over shared keys: those of all ranks that share heads."""
    ranks = request.context_parallel_size // request.prefill_context_parallel_size
    return request.num_heads * ranks

"""Fast host provider; the work is proportional to the selected keys, not to all keys."""

from __future__ import annotations

import torch

from .._shared.selected_attention import SelectedAttention, attend
from .._shared.sequences import KeyRows
from .arguments import SparseFlashAttentionArguments as Args
from .reference import Outputs, shaped_statistics


def run_cpu(a: Args) -> Outputs:
    """Attention of all rows in tiles; see the argument record."""
    assert a.query_rope is not None  # noqa: S101 - the contract guarantees it
    wide = torch.promote_types(a.query.dtype, torch.float32)
    sequences = a.sequences
    tokens = sequences.tokens
    query = torch.cat([a.query, a.query_rope], -1)
    keys = sequences.key_rows()
    result = attend(
        SelectedAttention(
            query=query.view(tokens, *query.shape[-2:]),
            indices=a.sparse_indices.reshape(tokens, -1),
            rows=sequences.query_rows(),
            keys=keys,
            gather=_Reader(a, keys, wide),
            value_size=a.query.shape[-1],
            scale=a.scale_value,
            block=a.sparse_block_size,
            causal=a.sparse_mode == 3,
            sinks=a.sinks,
        )
    )
    statistics = shaped_statistics(
        a.layout_query, a.query, result.maximum, result.total, wanted=a.return_softmax_lse
    )
    return result.out.view(a.query.shape), *statistics


class _Reader:
    """Reads latent and rotary parts side by side; the latent serves as keys and as values."""

    def __init__(self, a: Args, keys: KeyRows, wide: torch.dtype) -> None:
        self._args = a
        self._keys = keys
        self._wide = wide

    def __call__(
        self, request: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a, size = self._args, self._args.key.shape[-1]
        assert a.key_rope is not None  # noqa: S101 - the contract guarantees it
        key = torch.empty(*position.shape, size + a.key_rope.shape[-1], dtype=self._wide)
        key[..., :size] = self._keys.read(a.key, request, position)
        key[..., size:] = self._keys.read(a.key_rope, request, position)
        if a.value is None or _same_view(a.value, a.key):
            return key, key[..., :size]
        return key, self._keys.read(a.value, request, position).to(self._wide)


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()

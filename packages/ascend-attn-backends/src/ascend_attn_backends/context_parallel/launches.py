"""Attention by fused_infer_attention_score over keys that ranks share, for any kind of cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch

from ascend_attn_ops import PartialAttention, merge_partials

from ..batch import AttentionBatch
from ..masks import MaskMode
from ..partial_metadata import PartialMetadata, PartialMetadataBuilder
from ..standard import AttentionLaunch
from .common import (
    AscendDCPLengths,
    DCPImplMixin,
    DCPMetadataBuilderMixin,
    Tensors,
    without_keys,
)


@attrs.frozen(eq=False, kw_only=True)
class SharedKeysMetadata(PartialMetadata):
    """Metadata of one step on one rank.

    The lengths of ``launches``, ``max_seq_len`` and ``keyless_tokens`` speak of the keys that are
    read from this rank's cache.

    Attributes:
        dcp: Lengths of all ranks.
    """

    dcp: AscendDCPLengths

    @property
    def num_own_tokens(self) -> int:
        """Tokens whose results this rank wants; the output rows after them are set to zero."""
        return self.num_tokens

    @property
    def current_launches(self) -> Sequence[AttentionLaunch]:
        """Calls over the keys of this rank's own tokens, where the step is split."""
        return self.launches


@attrs.frozen
class SharedKeysMetadataBuilder(DCPMetadataBuilderMixin, PartialMetadataBuilder):
    """Builds the fields of :class:`SharedKeysMetadata`; see the base classes for its attributes."""

    def _shared_fields(self, batch: AttentionBatch) -> dict[str, Any]:
        dcp = self.dcp_lengths(batch)
        return {**self._partial_fields(batch, list(dcp.local_cached_lens)), "dcp": dcp}


class RankStep(Protocol):
    """What one rank brings to a step of one layer."""

    @property
    def metadata(self) -> SharedKeysMetadata:
        """Of this step on this rank."""

    @property
    def queries(self) -> Tensors:
        """``[num_own_tokens or more, N / size, size of a head]`` each."""


class SharedKeysLayer(ABC, DCPImplMixin):
    """A layer over keys that ranks share; mixed into a layer with the operator call."""

    @abstractmethod
    def _call(
        self, queries: Tensors, keys: Tensors, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator on these queries and keys (paged where there is a ``block_table``)."""

    @abstractmethod
    def _caches(self, step: Any) -> Tensors:
        """The caches of a step as the operator reads them."""

    @abstractmethod
    def _current(self, step: Any) -> Tensors:
        """Keys and values ``[num_own_tokens or more, heads, size]`` for this rank's heads."""

    def _attend_shared(self, step: RankStep, output: torch.Tensor) -> torch.Tensor:
        """Attention of this rank's tokens over the keys of all ranks, written into ``output``."""
        metadata = step.metadata
        rows = metadata.num_own_tokens
        queries = tuple(query[:rows] for query in step.queries)
        parts = [
            self.over_all_keys(queries, lambda gathered: self.over_cache(gathered, step), metadata)
        ]
        if metadata.dcp.splits_current:
            parts.append(self.over_current(step))
        output[:rows] = merge_partials(parts).out
        output[rows:].zero_()
        return output

    def over_cache(self, queries: Tensors, step: RankStep) -> PartialAttention:
        """Attention of the given heads over this rank's cached keys.

        There is no mask: on a shard it would be wrong, and where a token may not see all cached
        keys the step is split. One rank alone has all keys and the usual mask.

        Args:
            queries: ``[num_tokens, heads, size of a head]`` each, of all ranks' heads in an
                exchange.
            step: What this rank brings.

        Returns:
            out ``[num_tokens, heads, D]`` and lse ``[num_tokens, heads]``; tokens whose request has
            no key here have out 0 and lse -inf, by length, whatever the operator wrote.
        """
        metadata = step.metadata
        whole, caches = without_keys(queries[0]), self._caches(step)
        for launch in metadata.launches:
            if any(launch.seq_lens):
                result = self._call(
                    tuple(launch.gather(query) for query in queries),
                    caches,
                    actual_seq_lengths=launch.query_lens_cumulative,
                    actual_seq_lengths_kv=launch.seq_lens,
                    block_table=launch.block_table,
                    block_size=metadata.block_size,
                    **_mask(metadata, causal=launch.causal and metadata.dcp.shard.size == 1),
                )
                _put(result, launch, whole)
        return metadata.neutral(whole)

    def over_current(self, step: RankStep) -> PartialAttention:
        """Attention of this rank's heads and tokens over the keys of these tokens, as given.

        Returns:
            out ``[num_own_tokens, N / size, D]`` and lse ``[num_own_tokens, N / size]``.
        """
        metadata = step.metadata
        whole = without_keys(step.queries[0][: metadata.num_own_tokens])
        for launch in metadata.current_launches:
            result = self._call(
                tuple(launch.gather(query) for query in step.queries),
                tuple(launch.gather(rows) for rows in self._current(step)),
                actual_seq_lengths=launch.query_lens_cumulative,
                actual_seq_lengths_kv=launch.query_lens_cumulative,
                **_mask(metadata, causal=launch.causal),
            )
            _put(result, launch, whole)
        return whole


def _mask(metadata: SharedKeysMetadata, *, causal: bool) -> dict[str, Any]:
    mode = MaskMode.for_window(None, causal=causal)
    return {
        "atten_mask": metadata.causal_template if mode.needs_template else None,
        "sparse_mode": mode.sparse_mode,
        "softmax_lse_flag": True,
    }


def _put(
    result: tuple[torch.Tensor, torch.Tensor], launch: AttentionLaunch, whole: PartialAttention
) -> None:
    part = PartialAttention.from_infinite_lse(*result)
    launch.scatter(part.out, whole.out)
    launch.scatter(part.lse, whole.lse)

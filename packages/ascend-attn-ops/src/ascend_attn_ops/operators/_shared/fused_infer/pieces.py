"""Runs of query rows that the fast provider computes together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import attrs
import torch

from .problem import Span


@attrs.frozen(eq=False)
class Bucket:
    """Equally long runs of query rows of requests with similar key counts.

    Attributes:
        rows: (R, n) query rows.
        requests: (R,) request numbers.
        offsets: (R,) number of the first row within its request.
        kv_lens: (R,) key counts.
        ends: (R,) key position that the first row has under bottom-right alignment.
    """

    rows: torch.Tensor
    requests: torch.Tensor
    offsets: torch.Tensor
    kv_lens: torch.Tensor
    ends: torch.Tensor

    @property
    def count(self) -> int:
        """n: query rows of each run."""
        return self.rows.shape[1]

    @property
    def size(self) -> int:
        """R: number of runs."""
        return self.rows.shape[0]


def buckets(spans: Iterable[Span], *, most_rows: int, most: int, most_runs: int) -> list[Bucket]:
    """Runs of at most ``most_rows`` rows; a bucket has ``most_runs`` runs and ``most`` rows."""
    groups: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
    for span in spans:
        if span.kv_len == 0:
            continue  # no keys: the output stays zero
        for offset in range(0, span.q_len, most_rows):
            count = min(most_rows, span.q_len - offset)
            run = (span.start + offset, span.request, offset, span.kv_len, span.q_len)
            groups[count, span.kv_len.bit_length()].append(run)
    found = []
    for (count, _), runs in groups.items():
        together = max(min(most // count, most_runs), 1)
        parts = range(0, len(runs), together)
        found += [_bucket(count, runs[first : first + together]) for first in parts]
    return found


def _bucket(count: int, runs: list[tuple[int, ...]]) -> Bucket:
    starts, requests, offsets, kv_lens, q_lens = torch.tensor(runs).unbind(1)
    rows = starts[:, None] + torch.arange(count)
    return Bucket(rows, requests, offsets, kv_lens, kv_lens - q_lens + offsets)


def cleared(rows: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    """Keys or values [R, KN, n, D] with zeros where ``unused`` [R, n].

    A slot that no token was written to may hold anything, NaN too, which a weight of 0 would not
    hide.
    """
    if not bool(unused.any()):
        return rows
    return rows.masked_fill(unused[:, None, :, None], 0.0)

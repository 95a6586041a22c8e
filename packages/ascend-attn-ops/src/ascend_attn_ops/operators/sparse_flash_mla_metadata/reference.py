"""The plan as CANN's tensor."""

from __future__ import annotations

from itertools import pairwise

import attrs
import numpy as np
import torch

from ...arguments import tensors_of
from ...context import current_profile
from ...refusals import OpArgumentError
from .arguments import SparseFlashMlaMetadataArguments as Args
from .rows import PlanRows, machine_for, plan_rows
from .rules import CONTRACT

_TOLERANCE = 2  # a core takes a row whose last block overruns its share by less than half a block
Place = tuple[int, int]


def run_reference(a: Args) -> torch.Tensor:
    """The plan on the device of the length tensors; see the argument record."""
    refusals = CONTRACT.broken_values(a, current_profile())
    if refusals:
        raise OpArgumentError(CONTRACT.name, refusals)
    limits = CONTRACT.limits
    machine = machine_for(a)
    cores = machine.cores.cube // (2 if machine.pairs else 1)
    shares = share_rows(plan_rows(a, machine), a.batch, cores)
    words = np.zeros(limits["words"], dtype=np.int32)
    count, size = limits["cube_records"], limits["cube_record_words"]
    records = words[: count * size].reshape(count, size)
    copies = 2 if machine.pairs else 1
    for core, (start, end) in enumerate(pairwise(((0, 0), *shares.ends))):
        records[core * copies : (core + 1) * copies, :7] = (1, *start, 0, *end, 0)
    if machine.pairs:
        records[: cores * 2, 8] = shares.most_blocks
    plan = torch.from_numpy(words)
    lengths = next(iter(tensors_of(a)), None)
    return plan if lengths is None else plan.to(lengths.device)


@attrs.frozen
class Shares:
    """How the rows are dealt out.

    Attributes:
        ends: Where each used core ends: (request, row), exclusive.
        most_blocks: Largest number of blocks of a core.
    """

    ends: tuple[Place, ...]
    most_blocks: int


def share_rows(rows: PlanRows, batch: int, cores: int) -> Shares:
    """Deal out rows in order: whole requests while they fit a core's share, then single rows."""
    end: Place = (batch, 0)
    total = int(rows.cost.sum())
    if total == 0:
        return Shares((end,), 0)
    dealer = _Dealer.over(rows)
    ends: list[Place] = []
    most = 0
    left = total
    for core in range(cores):
        if left <= 0:
            break
        limit = max(left // (cores - core), dealer.dearest)
        start = dealer.row
        left -= dealer.deal(limit)
        row = dealer.row
        most = max(most, sum(dealer.blocks[start:row]))
        ends.append(end if row == len(dealer.cost) else (dealer.request[row], dealer.number[row]))
    return Shares(tuple(ends), most)


@attrs.define(slots=False)
class _Dealer:
    """The row that is dealt next; plain lists, because single elements are read."""

    request: list[int]
    number: list[int]
    blocks: list[int]
    cost: list[int]
    last: list[int]
    dearest: int
    row: int = 0

    @classmethod
    def over(cls, rows: PlanRows) -> _Dealer:
        return cls(
            rows.request.tolist(),
            rows.number.tolist(),
            rows.blocks.tolist(),
            rows.cost.tolist(),
            rows.last.tolist(),
            int(rows.cost.max()),
        )

    def deal(self, limit: int) -> int:
        """Move on by what one core takes; returns its cost."""
        return self._rows(limit, self._requests(limit))

    def _requests(self, limit: int) -> int:
        done = 0
        while self.row < len(self.cost):
            stop = self.row
            rest, tail = 0, 0
            while stop < len(self.cost) and self.request[stop] == self.request[self.row]:
                rest += self.cost[stop]
                tail = self.last[stop] if self.blocks[stop] else tail
                stop += 1
            if rest and done + rest > limit + tail // _TOLERANCE:
                break
            done += rest
            self.row = stop
        return done

    def _rows(self, limit: int, done: int) -> int:
        while self.row < len(self.cost):
            if done + self.cost[self.row] > limit + self.last[self.row] // _TOLERANCE:
                break
            done += self.cost[self.row]
            self.row += 1
            while self.row < len(self.cost) and not self.blocks[self.row]:
                self.row += 1
        return done

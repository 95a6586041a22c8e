"""Which core computes which blocks: contiguous runs whose slowest core has least to do.

Positions are (row, key blocks done in that row); a position's *work* is the cost of everything
before it in its section. Runs are found in two steps: the smallest limit that the cores can keep
(bisection, each trial one greedy walk), then stops as near as possible to an even share of what
is left, within that limit.

Sections, costs, the choice between whole rows and split rows, and the records of split rows
follow ops-transformer SectionStreamK. Decision: the vendor's greedy walk leaves open where within
its tolerance a core stops; ours stops where the makespan is least.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import attrs

from .blocks import BlockSizes
from .grid import Grid, block_cost

L2_BYTES = 96 * 2**20  # what one section's tensors may take
FEW_BLOCKS = 3  # no split when the slowest core has at most so many full blocks without it
SPLIT_GAIN = 10  # full blocks that splitting rows must save to be worth the merge

Position = tuple[int, int]


@attrs.frozen
class MergeTask:
    """A row whose keys several cores share.

    Attributes:
        row: Row of the grid.
        first_partial: Index of its first partial result in the workspace.
        partials: Number of cores that share it.
    """

    row: int
    first_partial: int
    partials: int


@attrs.frozen
class Section:
    """Runs of one section.

    Attributes:
        first_row: First row of the section.
        last_row: One after its last row.
        last_head: One after its last bn.
        stops: Where each used core ends.
        first_partials: Index of the first partial result of each used core.
        tasks: Rows to merge.
    """

    first_row: int
    last_row: int
    last_head: int
    stops: tuple[Position, ...]
    first_partials: tuple[int, ...]
    tasks: tuple[MergeTask, ...]


def sections_of(grid: Grid, sizes: BlockSizes, cores: int) -> list[int]:
    """Ends (bn indices) of the sections, each as long as its tensors fit the L2 budget."""
    small = grid.tallest <= sizes.m
    if small or int(grid.head_bytes.max(initial=0)) <= L2_BYTES // cores:
        return [grid.heads]
    total = [0, *grid.head_bytes.cumsum().tolist()]
    ends: list[int] = []
    head = 0
    while head < grid.heads:
        head = max(bisect_right(total, total[head] + L2_BYTES) - 1, head + 1)
        ends.append(head)
    return ends


def balance(grid: Grid, sizes: BlockSizes, cores: int) -> list[Section]:
    """All sections of a grid over ``cores`` cube cores."""
    ends = sections_of(grid, sizes, cores)
    full = int(block_cost(sizes.m, sizes.s2))
    starts = [0, *ends[:-1]]
    return [
        _section(grid, start, end, cores, full, always_split=len(ends) > 1)
        for start, end in zip(starts, ends, strict=True)
    ]


def _section(
    grid: Grid, first_head: int, last_head: int, cores: int, full: int, *, always_split: bool
) -> Section:
    first, last = int(grid.row_of_head[first_head]), int(grid.row_of_head[last_head])
    blocks = int(grid.blocks[first:last].sum())
    if blocks == 0:
        return Section(first, last, last_head, ((last, 0),), (0,), ())
    walk = Walk.over(grid, first, last)
    cores = min(cores, blocks)
    whole, whole_cost = walk.runs(cores, split=False)
    split, split_cost = walk.runs(cores, split=True)
    few = whole_cost <= FEW_BLOCKS * full
    if always_split or (not few and whole_cost - SPLIT_GAIN * full > split_cost):
        partials, tasks = merge_tasks(first, split)
        return Section(first, last, last_head, tuple(split), tuple(partials), tuple(tasks))
    return Section(first, last, last_head, tuple(whole), (0,) * len(whole), ())


@attrs.frozen(eq=False)
class Walk:
    """Positions of one section by the work before them.

    Attributes:
        first: First row.
        total: (R + 1) work before each row of the section; plain lists, because the walk reads
            single elements.
        full: (R) cost of a block that is not the last of its row.
        blocks: (R) blocks per row.
        largest: Cost of the dearest row and of the dearest block.
    """

    first: int
    total: list[int]
    full: list[int]
    blocks: list[int]
    largest: tuple[int, int]

    @classmethod
    def over(cls, grid: Grid, first: int, last: int) -> Walk:
        """The walk over rows first .. last - 1."""
        rows = slice(first, last)
        cost, blocks = grid.cost[rows], grid.blocks[rows]
        dearest = grid.full[rows] * (blocks > 1)
        single = grid.last[rows] * (blocks > 0)
        return cls(
            first,
            [0, *cost.cumsum().tolist()],
            grid.full[rows].tolist(),
            blocks.tolist(),
            (int(cost.max()), max(int(dearest.max()), int(single.max()))),
        )

    def runs(self, cores: int, *, split: bool) -> tuple[list[Position], int]:
        """Stops of the cores and the cost of the slowest one."""
        limit = self._least_limit(cores, split)
        earliest = self._earliest(cores, limit, split)
        stops: list[Position] = []
        done = slowest = 0
        for core in range(cores):
            if done == self.total[-1]:
                break
            share = (self.total[-1] - done) / (cores - core)
            stop = max(self._nearest(done, share, split), earliest[core + 1])
            if self._work(stop) - done > limit:
                stop = self._around(done + limit, split)[0]
            slowest = max(slowest, self._work(stop) - done)
            done = self._work(stop)
            stops.append((stop[0] + self.first, stop[1]))
        return stops, slowest

    def _nearest(self, done: int, share: float, split: bool) -> Position:
        """The position nearest to ``done + share``, at least one unit further than ``done``."""
        below, above = self._around(int(done + share), split)
        low, high = self._work(below), self._work(above)
        return above if low == done or high + low < 2 * (done + share) else below

    def _least_limit(self, cores: int, split: bool) -> int:
        """The smallest cost of the slowest core."""
        low = max(-(-self.total[-1] // cores), self.largest[split])
        high = low + self.largest[split]
        while low < high:
            middle = (low + high) // 2
            if self._fits(cores, middle, split):
                high = middle
            else:
                low = middle + 1
        return low

    def _fits(self, cores: int, limit: int, split: bool) -> bool:
        """Whether cores that each take as much as the limit allows get to the end."""
        total, full, done = self.total, self.full, 0
        for _ in range(cores):
            goal = done + limit
            if goal >= total[-1]:
                return True
            row = bisect_right(total, goal) - 1
            done = total[row] + ((goal - total[row]) // full[row] * full[row] if split else 0)
        return False

    def _earliest(self, cores: int, limit: int, split: bool) -> list[Position]:
        """For each count of used cores, the earliest stop that the remaining cores can finish."""
        stops: list[Position] = [(len(self.blocks), 0)]
        for _ in range(cores):
            stops.append(self._around(self._work(stops[-1]) - limit, split)[1])
        return stops[::-1]

    def _work(self, position: Position) -> int:
        row, done = position
        return self.total[row] + (done * self.full[row] if done else 0)

    def _around(self, work: int, split: bool) -> tuple[Position, Position]:
        """The last position with at most this work, and the first with at least this work."""
        if work <= 0:
            start = self._normal(0, 0)
            return start, start
        if work >= self.total[-1]:
            end = (len(self.blocks), 0)
            return end, end
        row = bisect_right(self.total, work) - 1
        done = (work - self.total[row]) // self.full[row] if split else 0
        below = (row, done)
        if self._work(below) == work:
            return below, below
        return below, self._normal(row, done + 1 if split else self.blocks[row])

    def _normal(self, row: int, done: int) -> Position:
        """(row, done), or the start of the next row that has blocks."""
        if done < self.blocks[row]:
            return row, done
        return bisect_right(self.total, self.total[row + 1] if done else self.total[row]) - 1, 0


def merge_tasks(first_row: int, stops: list[Position]) -> tuple[list[int], list[MergeTask]]:
    """First partial of each core, and the rows that more than one core computes.

    Partials are numbered in the order of (row, core), from 0 in every section.
    """
    first_partials: list[int] = []
    tasks: list[MergeTask] = []
    finished = shared = 0  # partials of finished rows, and of the row at the last stop so far
    start = (first_row, 0)
    for stop in stops:
        first_partials.append(finished + shared)
        if shared and stop[0] > start[0]:
            tasks.append(MergeTask(start[0], finished, shared + 1))
            finished, shared = finished + shared + 1, 0
        if stop[1]:
            shared += 1
        start = stop
    return first_partials, tasks


def share_merge(rows: list[int], partials: list[int], cores: int) -> Iterator[tuple[int, int, int]]:
    """Yield (task, first row, rows) per vector core; never more than ``cores`` of them.

    Each task gets cores in proportion to partials times rows, at least one, and splits its rows
    evenly. Decision: a task takes no core that a later task needs.
    """
    loads = [k * n for k, n in zip(partials, rows, strict=True)]
    average = max(-(-sum(loads) // cores), 1)
    spare = cores - len(rows)
    for task, (load, count) in enumerate(zip(loads, rows, strict=True)):
        wanted = min(max(load // average, 1), spare + 1, count)
        step = -(-count // wanted)
        used = -(-count // step)
        spare -= used - 1
        for start in range(0, count, step):
            yield task, start, min(step, count - start)

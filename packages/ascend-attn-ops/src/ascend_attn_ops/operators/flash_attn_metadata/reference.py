"""The plan as CANN's tensor: head, records of the cube cores, records of the vector cores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ...arguments import tensors_of
from ...context import current_profile
from ...refusals import OpArgumentError
from .._shared.flash_attn import Cores, current_cores
from .arguments import FlashAttnMetadataArguments as Args
from .balance import Position, Section, balance, share_merge
from .blocks import BlockSizes, block_sizes
from .grid import Grid, make_grid
from .rules import CONTRACT

RECORD = 16  # words of a record; the meanings are in the argument record's docstring
_BN2_S1G = 0  # code of the only output layout that this operator asks for
_KERNEL_FAILS = frozenset(f"{CONTRACT.name}.{key}" for key in ("prefix_sum_values", "used_values"))

Words = npt.NDArray[np.int32]
Place = tuple[int, int, int]


def metadata_words(requests: int, kv_heads: int, cores: Cores) -> int:
    """Size of the plan in int32 words; every (request, key head) could be its own section."""
    step: int = CONTRACT.limits["align_words"]
    words = RECORD * (1 + (cores.cube + cores.vector) * requests * kv_heads)
    return (words + step - 1) // step * step


def sizes_of(a: Args, cores: Cores) -> BlockSizes:
    """Block sizes of a call."""
    return block_sizes(
        head_dim=a.head_dim,
        group=a.num_heads_q // a.num_heads_kv,
        longest=a.longest,
        mask_mode=a.mask_mode or 0,
        windows=a.windows,
        vector_per_cube=cores.vector // cores.cube,
    )


def run_reference(a: Args) -> torch.Tensor:
    """The plan on the device of the length tensors; see the argument record."""
    refusals = CONTRACT.broken_values(a, current_profile())
    refusals = [refusal for refusal in refusals if refusal.rule in _KERNEL_FAILS]
    if refusals:
        raise OpArgumentError(CONTRACT.name, refusals)
    cores = current_cores()
    sizes = sizes_of(a, cores)
    grid = make_grid(a, sizes)
    sections = balance(grid, sizes, cores.cube)
    words = np.zeros(metadata_words(a.requests, a.num_heads_kv, cores), dtype=np.int32)
    fa_words, fd_words = len(sections) * cores.cube * RECORD, len(sections) * cores.vector * RECORD
    fa = words[RECORD : RECORD + fa_words].reshape(len(sections), cores.cube, RECORD)
    fd = words[RECORD + fa_words :][:fd_words].reshape(len(sections), cores.vector, RECORD)
    start = (0, 0, 0)
    for index, section in enumerate(sections):
        start = _write_runs(fa[index], grid, section, start)
        _write_merges(fd[index], grid, section, cores.vector)
    split = any(section.tasks for section in sections)
    head = (len(sections), split, sizes.m, sizes.s2, cores.cube, cores.vector, _BN2_S1G)
    words[: len(head)] = head
    plan = torch.from_numpy(words)
    lengths = next(iter(tensors_of(a)), None)
    return plan if lengths is None else plan.to(lengths.device)


def _write_runs(records: Words, grid: Grid, section: Section, start: Place) -> Place:
    """One record per used cube core; returns where the section ends."""
    for core, (stop, partial) in enumerate(zip(section.stops, section.first_partials, strict=True)):
        end = _place(grid, section, stop)
        records[core, :7] = (*start, *end, partial)
        start = end
    return start


def _place(grid: Grid, section: Section, position: Position) -> Place:
    """(bn, m, s2) indices of a position."""
    row, done = position
    if row == section.last_row:
        return section.last_head, 0, 0
    return int(grid.bn[row]), int(grid.m[row]), int(grid.first[row]) + done


def _write_merges(records: Words, grid: Grid, section: Section, vector_cores: int) -> None:
    """One record per vector core that merges a share of the rows of a task."""
    tasks = section.tasks
    rows = [int(grid.rows[task.row]) for task in tasks]
    shares = share_merge(rows, [task.partials for task in tasks], vector_cores)
    for core, (index, first, count) in enumerate(shares):
        task = tasks[index]
        where = int(grid.bn[task.row]), int(grid.m[task.row])
        records[core, :6] = (*where, task.first_partial, task.partials, first, count)

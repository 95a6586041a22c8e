"""Ranks as gloo processes: every backend, layout and step of one world size in one go."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from attn_backends_support import Scenario
from cp_support import SHARED_KEYS, SPREAD, STEPS, Layout, Ranks, latent_rank, sparse_rank
from cp_support import standard_rank as grouped_rank
from dsa_steps import KINDS, CompressedStep
from latent_support import LatentScenario
from sparse_oracle import SparseStep

from ascend_attn_backends import TorchDCPGroup

GROUP_TIMEOUT = 300
"""Seconds that a process waits for the others; starting them takes most of a minute at worst."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases(size: int) -> Iterator[tuple[str, Layout, str, str]]:
    """(backend, layout, step, dtype) of a world of this size."""
    for layout in (*SHARED_KEYS, *SPREAD):
        if layout.size != size:
            continue
        backends = ["mla", "sfa"]
        if not layout.spreads_tokens:
            backends += ["standard", *KINDS]
        for backend in backends:
            for step in STEPS:
                interleaved = Layout(
                    tokens=layout.tokens,
                    heads=layout.heads,
                    shares_keys=layout.shares_keys,
                    interleave=3 if step in ("short", "mixed") else 1,
                )
                yield backend, interleaved, step, "float32"
            if backend in ("mla", "sfa", "standard"):
                yield backend, layout, "mixed", "bfloat16"


def scenario(backend: str, step: str, dtype: str = "float32") -> object:
    """The same requests on every rank."""
    lens = STEPS[step][:2]
    if backend in KINDS:
        return CompressedStep(*lens, backend)
    kinds = {"standard": Scenario, "mla": LatentScenario, "sfa": SparseStep}
    return kinds[backend](*lens, dtype=DTYPES[dtype])


def rank_outputs(
    backend: str, layout: Layout, step: str, dtype: str, ranks: Ranks
) -> tuple[torch.Tensor, ...]:
    """What one rank computes: the output, for ``sfa`` behind the choice."""
    made = scenario(backend, step, dtype)
    if isinstance(made, CompressedStep):
        return (made.on_rank(layout, ranks),)
    if isinstance(made, Scenario):
        return (grouped_rank(made, layout, ranks),)
    if isinstance(made, SparseStep):
        return sparse_rank(made, STEPS[step][2], layout, ranks)
    assert isinstance(made, LatentScenario)
    return (latent_rank(made, STEPS[step][2], layout, ranks),)


def run_rank(rank: int, size: int, folder: str) -> None:
    """One gloo process; writes its outputs, in the order of :func:`cases`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
    )
    try:
        groups: dict[tuple[int, int], Ranks] = {}
        outputs = []
        for backend, layout, step, dtype in cases(size):
            form = (layout.tokens, layout.heads)
            if form not in groups:
                groups[form] = _ranks(rank, layout)
            with torch.no_grad():
                outputs.append(list(rank_outputs(backend, layout, step, dtype, groups[form])))
        torch.save(outputs, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def _ranks(rank: int, layout: Layout) -> Ranks:
    """The groups of this rank; every process makes all groups, in one order."""
    tokens, heads = layout.tokens, layout.heads
    of_tokens = [list(range(first, tokens * heads, heads)) for first in range(heads)]
    of_heads = [list(range(t * heads, (t + 1) * heads)) for t in range(tokens)]
    made = {
        tuple(members): TorchDCPGroup(group)
        for members in (*of_tokens, *of_heads)
        for group in [dist.new_group(members)]
        if rank in members
    }
    found = [
        made[tuple(members)]
        for sets in (of_tokens, of_heads)
        for members in sets
        if rank in members
    ]
    return Ranks(rank, found[0], found[1])


def run_world(size: int, folder: Path) -> list[list[list[torch.Tensor]]]:
    """Outputs of every rank of a world: ``[rank][case][tensor]``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "ascend_attn_backends"])
    processes = [
        context.Process(target=run_rank, args=(rank, size, str(folder))) for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + GROUP_TIMEOUT
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]

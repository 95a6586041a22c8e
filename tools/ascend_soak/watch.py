"""What a server holds: memory of its processes, KV cache, shared memory."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import psutil
from ascend_demo.guard import group_members
from ascend_demo.server import fetch
from prometheus_client.parser import text_string_to_metric_families

SAMPLE_SECONDS: Final = 1.0
Held = TypeVar("Held", dict[str, float], list[int], list[Path])
FLAT_SHARE: Final = 1.05
FLAT_BYTES: Final = 64 << 20
"""Memory is flat if its last quarter is at most 5 % or 64 MiB above its second quarter."""
SHARED: Final = Path("/dev/shm")  # noqa: S108 - only looked at
"""Where shared memory is seen as files (Linux)."""
_HELD: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


def memory(group: int) -> int:
    """Bytes that the processes of a group hold together, shared pages counted once (USS)."""
    total = 0
    for pid in group_members(group):
        try:
            total += psutil.Process(pid).memory_full_info().uss
        except psutil.Error:
            continue  # it ended meanwhile
    return total


@contextmanager
def sampled_memory(group: int) -> Iterator[list[int]]:
    """Memory of a process group, once per second while the block runs."""
    samples: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            samples.append(memory(group))

    thread = threading.Thread(target=watch, name="memory")
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def growth(samples: Sequence[int]) -> tuple[int, int] | None:
    """Medians of the second and the last quarter; None with fewer than 8 samples."""
    quarter = len(samples) // 4
    if quarter < 2:
        return None
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return int(statistics.median(early)), int(statistics.median(late))


def is_flat(early: int, late: int) -> bool:
    """Whether memory did not grow, by the bounds above."""
    return late <= max(early * FLAT_SHARE, early + FLAT_BYTES)


def held(metrics: str) -> dict[str, float]:
    """Requests and share of the KV cache that a server holds, from what `/metrics` answers."""
    found = dict.fromkeys(_HELD, 0.0)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found


def ended(metrics: str, reason: str) -> int:
    """How many requests ended for a reason, from what `/metrics` answers."""
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
        and sample.labels["finished_reason"] == reason
    )


def wait_until_free(url: str, seconds: float) -> dict[str, float]:
    """Wait until the server holds nothing; returns what it still holds, empty if nothing."""

    def left() -> dict[str, float]:
        return {name: value for name, value in held(fetch(url + "/metrics")).items() if value}

    return _wait(left, seconds)


def wait_until_gone(group: int, seconds: float) -> list[int]:
    """Wait until a process group is gone; returns what is left of it."""
    return _wait(lambda: group_members(group), seconds)


def shared_memory(group: int) -> set[Path]:
    """Shared memory that the processes of a group have mapped now."""
    found = set()
    for pid in group_members(group):
        try:
            maps = psutil.Process(pid).memory_maps()
        except psutil.Error:
            continue  # it ended meanwhile
        found |= {Path(one.path) for one in maps if one.path.startswith(f"{SHARED}/")}
    return {path for path in found if path.exists()}  # a mapping outlives the name of its file


def wait_until_removed(paths: set[Path], seconds: float) -> list[Path]:
    """Wait until files are gone; returns those that are not."""
    return _wait(lambda: sorted(path for path in paths if path.exists()), seconds)


def _wait(look: Callable[[], Held], seconds: float) -> Held:
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.25)
    return found

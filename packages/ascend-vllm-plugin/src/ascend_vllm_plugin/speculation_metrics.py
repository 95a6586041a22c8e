"""What the background drafters count, from the process that drafts to vLLM's `/metrics`.

vLLM's server answers `/metrics` in one process and drafts in another, and hands no figures of a
custom drafter over. The drafting process therefore keeps its counters in a small file that both map
into memory, named after vLLM's instance id; a Prometheus collector in the server's process reads it
when it is scraped. Nothing is written to disk in between, and a scrape stops nobody.

With several API servers (`--api-server-count`) vLLM serves another registry, without collectors;
these metrics are then missing from it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from ascend_vllm_plugin.errors import EnvironmentVariableError
from ascend_vllm_plugin.server_watch import when_server_is_gone

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.config import VllmConfig

PREFIX: Final = "ascend:spec_decode_"

COUNTERS: Final[Mapping[str, str]] = {
    "num_ahead_drafts": "Drafts that were ready when their step came, and used.",
    "num_waited_drafts": "Drafts made while their step waited, ready in time, and used.",
    "num_late_drafts": "Drafts that missed the deadline; their request was decoded plainly.",
    "num_discarded_drafts": "Drafts made ahead that the target did not follow.",
    "num_draft_errors": "Drafts lost to an exception of the drafter.",
}
"""Name without prefix -> what is counted, in drafts of single requests."""

GAUGES: Final[Mapping[str, str]] = {
    "num_speculative_tokens": "Tokens drafted for each request of the current step (k).",
}

_FIELDS: Final = (*COUNTERS, *GAUGES)
_PLACES: Final = {name: index for index, name in enumerate(_FIELDS)}
_SUFFIX: Final = ".speculation"


def metrics_folder() -> Path:
    """Folder of the counters, readable by nobody else; made where it does not exist.

    Raises:
        EnvironmentVariableError: the folder for temporary files has one of that name that is not
            ours alone.
    """
    folder = Path(tempfile.gettempdir()) / f"ascend-vllm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EnvironmentVariableError(
            "TMPDIR",
            str(folder.parent),
            f"a folder in which {folder.name} is absent, or a folder that only this user can open",
        )
    return folder


class SpeculationCounters:
    """The counters of one drafting process: attributes named in `COUNTERS` and `GAUGES`.

    Args:
        path: file to keep them in for others to read. It goes away with the process, and with
            the server of `ascend-vllm serve`; where the process was killed, the next one of this
            package to start or end removes it. None keeps them to this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._values: Any = np.zeros(len(_FIELDS), dtype=np.int64)
        if path is not None:
            _remove_orphans(path.parent)
            self._values = np.memmap(_owned_file(path), dtype=np.int64, mode="r+")
            atexit.register(path.unlink, missing_ok=True)
            when_server_is_gone(partial(path.unlink, missing_ok=True))

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self._values[_PLACES[name]] += amount

    def set(self, name: str, value: int) -> None:
        """Say what a gauge shows."""
        self._values[_PLACES[name]] = value

    def as_dict(self) -> dict[str, int]:
        """All of them by name."""
        return dict(zip(_FIELDS, self._values.tolist(), strict=True))


def counters_of(vllm_config: VllmConfig) -> SpeculationCounters:
    """The counters that the engine of this configuration exports from this process."""
    parallel = vllm_config.parallel_config
    # Every tensor parallel rank drafts; vLLM takes what the first one says.
    if parallel.rank % parallel.tensor_parallel_size:
        return SpeculationCounters()
    name = f"{vllm_config.instance_id}.{parallel.data_parallel_index}{_SUFFIX}"
    return SpeculationCounters(metrics_folder() / name)


def export_speculation_metrics(vllm_config: VllmConfig) -> None:
    """Have this process's Prometheus registry show what the drafters of an engine count.

    Nothing happens where its drafter is none of this package's.
    """
    speculative = vllm_config.speculative_config
    model = "" if speculative is None else str(speculative.model)
    if speculative is None or speculative.method != "custom_class":
        return
    if model.startswith(f"{__package__}."):
        _collector().watch(vllm_config)


class SpeculationCollector:
    """Reads the counters of the engines that it was told of, labelled as vLLM labels its own."""

    def __init__(self) -> None:
        self._watched: list[VllmConfig] = []

    def watch(self, vllm_config: VllmConfig) -> None:
        """Show the engine of a configuration; vLLM names its instance later than this."""
        if not any(known is vllm_config for known in self._watched):
            self._watched.append(vllm_config)

    def collect(self) -> Iterable[Metric]:
        """Every metric, with a sample for each engine that drafts."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ("model_name", "engine")
        families: dict[str, Any] = {
            name: CounterMetricFamily(PREFIX + name, text, labels=labels)
            for name, text in COUNTERS.items()
        }
        for name, text in GAUGES.items():
            families[name] = GaugeMetricFamily(PREFIX + name, text, labels=labels)
        for key, values in self._samples():
            for name, value in values.items():
                families[name].add_metric(key, value)
        return list(families.values())

    def _samples(self) -> Iterator[tuple[tuple[str, str], Mapping[str, int]]]:
        for path, vllm_config in self._files().items():
            model = str(vllm_config.model_config.served_model_name)
            engine = path.name.removesuffix(_SUFFIX).rpartition(".")[2]
            yield (model, engine), _read(path)

    def _files(self) -> Mapping[Path, VllmConfig]:
        """The counters of the watched engines, each with its configuration."""
        found: dict[Path, VllmConfig] = {}
        for vllm_config in self._watched:
            instance = vllm_config.instance_id
            if not instance:
                continue
            # vLLM appends `_dp<rank>` for the engines of a data parallel deployment.
            for pattern in (f"{instance}.*{_SUFFIX}", f"{instance}_dp*{_SUFFIX}"):
                for path in sorted(metrics_folder().glob(pattern)):
                    found.setdefault(path, vllm_config)
        return found

    def remove_files(self) -> None:
        """Remove the counters of the watched engines, which nobody reads any more.

        vLLM's server kills its engine when it ends, perhaps after this: the engine has no time to
        remove them, and until it is dead its lock would keep others from it.
        """
        for path in self._files():
            path.unlink(missing_ok=True)
        _remove_orphans(metrics_folder())


def _read(path: Path) -> Mapping[str, int]:
    try:
        values = np.fromfile(path, dtype=np.int64).tolist()
    except FileNotFoundError:  # the engine ended since the folder was listed
        return {}
    return dict(zip(_FIELDS, values, strict=True))


_owned: list[BinaryIO] = []
"""Files of this process; each holds a lock while it is open."""


def _owned_file(path: Path) -> BinaryIO:
    """A file of zeros under a lock that ends with this process, however it ends."""
    new = path.with_suffix(".new")
    file = new.open("w+b")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(bytes(8 * len(_FIELDS)))
    file.flush()
    new.replace(path)
    _owned.append(file)
    return file


def _remove_orphans(folder: Path) -> None:
    """Remove what processes left behind that were killed."""
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (FileNotFoundError, BlockingIOError):  # it has just ended, or it is alive
            continue


_registered: list[SpeculationCollector] = []


def _collector() -> SpeculationCollector:
    """The one collector of this process."""
    from prometheus_client import REGISTRY

    if not _registered:
        collector: Any = SpeculationCollector()
        REGISTRY.register(collector)
        atexit.register(collector.remove_files)
        _registered.append(collector)
    return _registered[0]

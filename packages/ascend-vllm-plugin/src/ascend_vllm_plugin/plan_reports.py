"""The plans of drafts in the routing file, kept up to date while the engine runs.

vLLM's server, told to stop, kills its engine at once (`--shutdown-timeout 0`, its default), so what
is written at the end alone is often not written at all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs

from ascend_vllm_plugin.routing import DraftPlans, RoutingTable

SECONDS: Final = 1.0
"""How old the plans in a routing file may be while an engine works."""

_log = logging.getLogger("vllm.ascend_vllm_plugin")


class PlanReports:
    """Writes a routing table again, in a thread of its own, whenever its plans have changed.

    Args:
        table: as it was when the model was loaded; it has plans.
        counters: the plans so far, by the names of `DraftPlans`.
        path: the routing file; None where nobody asked for one, and then no thread runs.
        seconds: time between two looks at the counters.
    """

    def __init__(
        self,
        table: RoutingTable,
        counters: Callable[[], Mapping[str, int]],
        path: Path | None,
        seconds: float = SECONDS,
    ) -> None:
        self._table, self._counters, self._path = table, counters, path
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ascend-plans", daemon=True)
        if path is not None:
            self._thread.start()

    def stop(self) -> DraftPlans:
        """Write the plans for the last time; returns them."""
        self._stopped.set()
        if self._path is not None:
            self._thread.join()
        table = self._now()
        self._write(table)
        assert table.plans is not None  # noqa: S101  # a table without plans has no reports
        return table.plans

    def _follow(self) -> None:
        while not self._stopped.wait(self._seconds):
            table = self._now()
            if table != self._table:
                self._write(table)

    def _now(self) -> RoutingTable:
        plans = self._table.plans
        assert plans is not None  # noqa: S101  # as above
        return attrs.evolve(self._table, plans=attrs.evolve(plans, **self._counters()))

    def _write(self, table: RoutingTable) -> None:
        """A folder that takes no file any more is no reason to stop an engine."""
        self._table = table
        if self._path is None:
            return
        try:
            table.write(self._path)
        except OSError as error:
            _log.error("the plans are not in the routing file: %s", error)

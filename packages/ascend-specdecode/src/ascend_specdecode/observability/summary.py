"""What a run achieved, as numbers, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs

from ascend_hwprofile.report import Table, table
from ascend_specdecode.adaptive.controller import SpeculationReport
from ascend_specdecode.observability.statistics import Statistics


@attrs.frozen
class Summary:
    """A run in numbers.

    Attributes:
        seconds: how long it took.
        tokens: tokens generated.
        requests: requests by ending, ``kind/reason``.
        drafts: verified rows with drafted tokens.
        plain_rows: verified rows without.
        acceptance_length: mean tokens of a row with drafts, bonus token included.
        acceptance: accepted share of all drafts, by position.
        lost_drafts: drafts of single requests lost to errors and time limits.
        degraded: requests that went on without drafts.
        ahead: drafts made ahead: (used, discarded).
        plain_tokens_per_second: of a run with k = 0, where one was made.
        speculation: what the engine knew of drafting at the end.
    """

    seconds: float
    tokens: int
    requests: Mapping[str, int]
    drafts: int
    plain_rows: int
    acceptance_length: float
    acceptance: tuple[float, ...]
    lost_drafts: int
    degraded: int
    ahead: tuple[int, int]
    plain_tokens_per_second: float | None = None
    speculation: SpeculationReport | None = None

    @classmethod
    def of(
        cls,
        statistics: Statistics,
        seconds: float,
        *,
        plain_tokens_per_second: float | None = None,
        speculation: SpeculationReport | None = None,
    ) -> Self:
        """Summarise an engine's counters.

        Args:
            statistics: of the engine.
            seconds: how long it ran.
            plain_tokens_per_second: measured with k = 0 on the same requests in the same run.
            speculation: what ``engine.speculation()`` returned.
        """
        return cls(
            seconds=seconds,
            tokens=statistics.generation_tokens,
            requests={"/".join(key): count for key, count in sorted(statistics.endings.items())},
            drafts=statistics.drafts,
            plain_rows=statistics.plain_rows,
            acceptance_length=statistics.acceptance_length,
            acceptance=tuple(statistics.acceptance_per_position()),
            lost_drafts=statistics.draft_errors + statistics.draft_timeouts,
            degraded=statistics.degraded_requests,
            ahead=(statistics.ahead_used, statistics.ahead_discarded),
            plain_tokens_per_second=plain_tokens_per_second,
            speculation=speculation,
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def speed_up(self) -> float | None:
        """Tokens per second over those of k = 0, None where that did not run; below 1 is a loss."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else None

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        derived = {"tokens_per_second": self.tokens_per_second, "speed_up": self.speed_up}
        return attrs.asdict(self) | derived

    def tables(self) -> tuple[Table, ...]:
        """Return the tables that people read."""
        positions = [
            (index, f"{share:.3f}", _bar(share)) for index, share in enumerate(self.acceptance, 1)
        ]
        found = [table("run", ("what", "value"), self._rows())]
        if positions:
            title = "acceptance by position (share of all drafts)"
            found.append(table(title, ("position", "accepted", ""), positions))
        return tuple(found)

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("requests", ", ".join(f"{count} {key}" for key, count in self.requests.items())),
            ("tokens", f"{self.tokens} in {self.seconds:.3f} s"),
            ("tokens per second", f"{self.tokens_per_second:.1f}"),
        ]
        if self.speed_up is not None:
            plain = f"{self.plain_tokens_per_second:.1f} tokens per second with k = 0"
            rows.append(("speed-up", f"{self.speed_up:.2f} over {plain}"))
        rows.append(("acceptance length", f"{self.acceptance_length:.2f} tokens"))
        rows.append(("rows", f"{self.drafts} with drafts, {self.plain_rows} without"))
        if any(self.ahead):
            rows.append(("drafted ahead", f"{self.ahead[0]} used, {self.ahead[1]} discarded"))
        if self.lost_drafts or self.degraded:
            lost = f"{self.lost_drafts}, {self.degraded} requests went on without"
            rows.append(("drafts lost", lost))
        return rows + self._speculation_rows()

    def _speculation_rows(self) -> list[tuple[str, str]]:
        known = self.speculation
        if known is None:
            return []
        even = known.break_even
        shown = "none is enough, or not known" if even is None else f"{even:.2f}"
        return [("k now", str(known.k)), ("break-even acceptance", shown)]


def _bar(share: float) -> str:
    return "#" * round(20 * share)

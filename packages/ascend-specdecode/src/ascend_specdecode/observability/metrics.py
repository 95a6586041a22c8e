"""Prometheus metrics of an engine, named as vLLM names them, with our prefix.

``ascend_specdecode:generation_tokens_total`` is what ``vllm:generation_tokens_total`` is there, so
that a dashboard made for one reads the other once the prefix is changed. :data:`OWN` lists the
counters that vLLM does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_specdecode.errors import MissingExtraError
from ascend_specdecode.observability.statistics import Histogram, Statistics

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from ascend_specdecode.orchestrator.engine import DraftVerify

PREFIX: Final = "ascend_specdecode:"


@attrs.frozen
class _Counter:
    """A counter: its name without prefix, what it counts, where the number is."""

    name: str
    text: str
    value: Callable[[Statistics], float]


SHARED: Final = (
    _Counter("spec_decode_num_drafts", "Verified drafts.", lambda s: s.drafts),
    _Counter("spec_decode_num_draft_tokens", "Verified draft tokens.", lambda s: sum(s.drafted)),
    _Counter(
        "spec_decode_num_accepted_tokens", "Accepted draft tokens.", lambda s: sum(s.accepted)
    ),
    _Counter("prompt_tokens", "Prompt tokens of submitted requests.", lambda s: s.prompt_tokens),
    _Counter("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    _Counter("num_preemptions", "Preemptions for lack of memory.", lambda s: s.preemptions),
)
"""Counters that vLLM has under the same names."""

OWN: Final = (
    _Counter("num_steps", "Target calls that were verified.", lambda s: s.steps),
    _Counter("plain_rows", "Verified rows without a draft.", lambda s: s.plain_rows),
    _Counter("draft_errors", "Drafts of requests lost to errors.", lambda s: s.draft_errors),
    _Counter("draft_timeouts", "Drafts of requests lost to limits.", lambda s: s.draft_timeouts),
    _Counter(
        "degraded_requests", "Requests that went on without drafts.", lambda s: s.degraded_requests
    ),
    _Counter("ahead_used", "Drafts made ahead that were used.", lambda s: s.ahead_used),
    _Counter(
        "ahead_discarded", "Drafts made ahead that were discarded.", lambda s: s.ahead_discarded
    ),
    _Counter("release_errors", "Errors while sequences were dropped.", lambda s: s.release_errors),
    _Counter("draft_seconds", "Seconds spent in propose.", lambda s: s.draft_seconds),
    _Counter("score_seconds", "Seconds spent in score.", lambda s: s.score_seconds),
    _Counter("verify_seconds", "Seconds spent in verify.", lambda s: s.verify_seconds),
)
"""Counters that only this package has."""

HISTOGRAMS: Final[Mapping[str, tuple[str, Callable[[Statistics], Histogram]]]] = {
    "time_to_first_token_seconds": ("Submission to first token.", lambda s: s.first_token),
    "inter_token_latency_seconds": ("Between tokens of a request.", lambda s: s.inter_token),
    "e2e_request_latency_seconds": ("Submission to last token.", lambda s: s.request),
}
"""Histograms that vLLM has under the same names."""


def prometheus_collector(
    engine: DraftVerify[Any], labels: Mapping[str, str] | None = None
) -> Collector:
    """Return a collector of an engine's metrics, to register with a Prometheus registry.

    ``prometheus_client.REGISTRY.register(prometheus_collector(engine, {"model_name": "glm-5"}))``.
    It reads the engine's counters when it is scraped and costs nothing in between.

    Args:
        engine: the engine.
        labels: put on every metric, such as vLLM's ``model_name`` and ``engine``.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """
    try:
        from prometheus_client.registry import Collector
    except ImportError:
        raise MissingExtraError(
            "the Prometheus collector", "prometheus-client", "metrics"
        ) from None

    class EngineCollector(Collector):
        """Reads one engine."""

        def collect(self) -> Iterable[Metric]:
            return _families(engine, dict(labels or {}))

    return EngineCollector()


def _families(engine: DraftVerify[Any], labels: Mapping[str, str]) -> Iterable[Metric]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    names, values = list(labels), list(labels.values())
    statistics, load = engine.statistics, engine.load
    for name, text, number in (
        ("num_requests_running", "Requests that hold target state.", load.running),
        ("num_requests_waiting", "Requests that wait for a place.", load.waiting),
        ("cached_tokens", "Positions of target state that are taken.", load.cached_tokens),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
        gauge.add_metric(values, number)
        yield gauge
    for counter in (*SHARED, *OWN):
        family = CounterMetricFamily(PREFIX + counter.name, counter.text, labels=names)
        family.add_metric(values, counter.value(statistics))
        yield family
    position = CounterMetricFamily(
        f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by position.",
        labels=[*names, "position"],
    )
    for index, accepted in enumerate(statistics.accepted):
        position.add_metric([*values, str(index)], accepted)
    yield position
    yield _endings(statistics, names, values)
    for name, (text, histogram_of) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(PREFIX + name, text, labels=names)
        found = histogram_of(statistics)
        histogram.add_metric(values, _cumulative(found), sum_value=found.total)
        yield histogram


def _endings(statistics: Statistics, names: list[str], values: list[str]) -> Metric:
    """Return vLLM's counter of requests by ``finished_reason``, which counts every ending."""
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        f"{PREFIX}request_success",
        "Requests that ended, by reason: stop and length are success.",
        labels=[*names, "finished_reason"],
    )
    for (_, reason), count in sorted(statistics.endings.items()):
        family.add_metric([*values, reason], count)
    return family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total, found = 0, []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return found

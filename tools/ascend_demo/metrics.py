"""Acceptance of drafted tokens and steps of the engine, from the Prometheus metrics of vLLM."""

from __future__ import annotations

from typing import Final

import attrs
from prometheus_client.parser import text_string_to_metric_families

_PREFIX: Final = "vllm:spec_decode_num_"
_STEPS: Final = "vllm:iteration_tokens_total_count"


@attrs.frozen
class Speculation:
    """Counters of speculative decoding.

    Attributes:
        drafts: how many times something was drafted.
        draft_tokens: tokens drafted.
        accepted_tokens: tokens accepted.
        accepted_per_position: [k], how many drafts had their first, second ... token accepted.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per drafted step, the recovered or bonus token included; None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """[k], share of the drafts whose token at that position was accepted."""
        return tuple(count / self.drafts for count in self.accepted_per_position if self.drafts)

    def since(self, earlier: Speculation) -> Speculation:
        """Return what was counted after `earlier`."""
        before = earlier.accepted_per_position
        padded = before + (0,) * (len(self.accepted_per_position) - len(before))
        pairs = zip(self.accepted_per_position, padded, strict=True)
        return Speculation(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(now - then for now, then in pairs),
        )


def parse_speculation(text: str) -> Speculation:
    """Read the counters from the text that `/metrics` answers.

    Raises:
        ValueError: a counter is missing, so speculation is not configured, or vLLM renamed it.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(_PREFIX) or not sample.name.endswith("_total"):
                continue
            name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
            if name == "accepted_tokens_per_pos":
                positions[int(sample.labels["position"])] = int(sample.value)
            else:
                totals[name] = int(sample.value)
    missing = {"drafts", "draft_tokens", "accepted_tokens"} - set(totals)
    if missing:
        raise ValueError(f"/metrics has no {_PREFIX}{sorted(missing)[0]}_total")
    per_position = tuple(positions[position] for position in sorted(positions))
    return Speculation(**totals, accepted_per_position=per_position)


def parse_steps(text: str) -> int:
    """Read how many steps the engine has computed from the text that `/metrics` answers.

    Raises:
        ValueError: the histogram of tokens per step is missing: vLLM renamed it.
    """
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _STEPS:
                return int(sample.value)
    raise ValueError(f"/metrics has no {_STEPS}")

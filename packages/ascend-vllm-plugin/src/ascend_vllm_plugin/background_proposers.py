"""Drafters of ascend-specdecode that draft ahead, behind vLLM's `method: "custom_class"`.

While the target computes a step, the drafter goes on in a thread of its own behind what it drafted
(`background_drafts.py`): where the target says what the drafter expected, the next draft is there
already. Where it does not, a draft is asked for and waited for until a deadline; one that is late
is skipped, its request takes a plain step, and what it found is used later if it still holds. So a
step never waits longer than the deadline, whatever the drafter does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ascend_specdecode import (
    AdaptiveConfig,
    AdaptiveK,
    Drafter,
    FirstDrafter,
    FixedK,
    PromptLookupDrafter,
    RaceDrafter,
    StepRecord,
    SuffixDrafter,
)
from ascend_vllm_plugin.background_drafts import BackgroundDrafter, DraftJob
from ascend_vllm_plugin.draft_rows import FollowedSequence, FollowedSequences, Prediction
from ascend_vllm_plugin.options import Options, options_from
from ascend_vllm_plugin.speculation_metrics import counters_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from vllm.config import VllmConfig

# Below vLLM's own logger, which has the handlers.
_log = logging.getLogger("vllm.ascend_vllm_plugin")

Wait = Callable[[threading.Event, float], bool]
"""Waits for an event, at most so many seconds; whether it was set."""


class BackgroundProposer:
    """Drafts ahead with the drafter of a subclass; see this module.

    Args:
        vllm_config: of the engine; options are those of `ascend_vllm_plugin.Options`.
        clock: seconds that only grow.
        wait: how a step waits for a draft.

    Raises:
        ValueError: the configuration has no number of draft tokens.
        OptionError: an option of this package is wrong.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wait: Wait = threading.Event.wait,
    ) -> None:
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.num_speculative_tokens is None:
            name = type(self).__name__
            raise ValueError(f"{name} needs speculative_config.num_speculative_tokens")
        options = options_from(vllm_config.additional_config)
        largest = int(speculative.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.counters = counters_of(vllm_config)
        self._deadline = options.draft_deadline_ms / 1000.0
        self._policy: AdaptiveK | FixedK = (
            AdaptiveK(largest, AdaptiveConfig(), pipelined=True)
            if options.adaptive_k
            else FixedK(largest, pipelined=True)
        )
        self._clock, self._wait = clock, wait
        self._background = BackgroundDrafter(self.drafter(options), clock)
        self._followed = FollowedSequences()
        self._job: DraftJob | None = None
        self._job_rows: list[FollowedSequence] = []
        self._k = 0
        self._draft_seconds: float | None = None
        self._waited = 0.0
        self._returned: float | None = None

    @staticmethod
    def drafter(options: Options) -> Drafter:
        """The drafter that is run in the background."""
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load; vLLM calls it on every drafter."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Hand out what is drafted for each request, and let the drafter go on behind it.

        Args:
            sampled_token_ids: per request the tokens of this step; empty while its prompt is
                still being computed, and then nothing is drafted.
            num_tokens_no_spec: [max_num_reqs], tokens of the request without drafts, the ones
                of this step included.
            token_ids_cpu: [max_num_reqs, max_model_len], the tokens themselves.
            slot_mappings: unused; a drafter with a KV cache needs it.

        Returns:
            Per request at most k tokens, never beyond the length of the model.
        """
        begun = self._clock()
        rows, gone = self._followed.follow(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self._background.forget(gone)
        self._learn(rows, begun)
        decoding = [one for one in rows if one is not None]
        self._k = self._policy.choose(len(decoding)) if decoding else 0
        self.counters.set("num_speculative_tokens", self._k)
        self._draft_seconds = None
        self._draft(decoding, begun)
        given = {id(one): self._hand_out(one) for one in decoding}
        self._go_on(decoding)
        self._returned = self._clock()
        self._waited = self._returned - begun
        return [[] if one is None else given[id(one)] for one in rows]

    def close(self) -> None:
        """End the drafter's thread."""
        self._background.close()

    def _draft(self, decoding: Sequence[FollowedSequence], begun: float) -> None:
        """Have a draft for every sequence that wants one, as far as the deadline allows."""
        self._collect()
        wanting = [one for one in decoding if self._room(one)]
        ready = [one for one in wanting if one.rest]
        self.counters.add("num_ahead_drafts", len(ready))
        missing = [one for one in wanting if not one.rest]
        self.counters.add("num_discarded_drafts", sum(_foresaw(one) for one in missing))
        if not missing:
            return
        limit = self._limit(len(decoding))
        if self._job is not None:  # still at what it began ahead
            self._wait_until(begun + limit)
        if self._job is None:
            self._start([one for one in missing if not one.rest], self._k)
            self._wait_until(begun + limit)
        found = sum(bool(one.rest) for one in missing)
        self.counters.add("num_waited_drafts", found)
        if self._job is not None:
            self.counters.add("num_late_drafts", len(missing) - found)

    def _limit(self, rows: int) -> float:
        worth = self._policy.draft_limit(self._k, rows)
        return self._deadline if worth is None else min(self._deadline, worth)

    def _wait_until(self, deadline: float) -> None:
        if self._job is not None:
            self._wait(self._job.done, max(0.0, deadline - self._clock()))
            self._collect()

    def _start(self, sequences: list[FollowedSequence], k: int, *, ahead: bool = False) -> None:
        if not sequences:
            return
        states = [one.state.assume(one.rest) if ahead else one.state for one in sequences]
        self._job, self._job_rows = self._background.start(states, k), sequences

    def _collect(self) -> None:
        """Take in the drafts of a job that has ended."""
        job = self._job
        if job is None or not job.done.is_set():
            return
        self._job = None
        if job.error is not None:
            self.counters.add("num_draft_errors", len(job.sequences))
            _log.warning("drafts of %d requests failed: %r", len(job.sequences), job.error)
            return
        self._draft_seconds = job.seconds
        for one, state, proposal in zip(self._job_rows, job.sequences, job.proposals, strict=True):
            if proposal.tokens:
                one.prediction = Prediction(state.length, (*state.assumed, *proposal.tokens))

    def _hand_out(self, one: FollowedSequence) -> list[int]:
        rest = one.rest
        one.prediction = Prediction(one.state.length, rest) if rest else None
        draft = list(rest[: self._room(one)])
        one.given = len(draft)
        return draft

    def _go_on(self, decoding: Sequence[FollowedSequence]) -> None:
        """Draft behind what was handed out: the token after it, and the next k."""
        if self._job is None and self._k:
            short = [one for one in decoding if one.rest and len(one.rest) <= one.given + self._k]
            self._start(short, self._k + 1, ahead=True)

    def _room(self, one: FollowedSequence) -> int:
        return max(0, min(self._k, self.max_model_len - one.state.length))

    def _learn(self, rows: Sequence[FollowedSequence | None], begun: float) -> None:
        """Tell the policy what the step that has just ended measured."""
        verified = [one for one in rows if one is not None and not one.is_new]
        if self._returned is None or not verified:
            return
        accepted = [one.sampled - 1 for one in verified]
        pairs = list(zip(verified, accepted, strict=True))
        self._policy.observe(
            StepRecord(
                rows=len(verified),
                k=self._k,
                scored=sum(one.given + 1 for one in verified),
                emitted=sum(one.sampled for one in verified),
                tried=[
                    sum(place < one.given and place <= right for one, right in pairs)
                    for place in range(self._policy.largest)
                ],
                accepted=[
                    sum(place < right for right in accepted)
                    for place in range(self._policy.largest)
                ],
                draft_seconds=self._draft_seconds,
                waited_seconds=self._waited,
                score_seconds=begun - self._returned,
                prompts=len(verified) < len(rows),
            )
        )


def _foresaw(one: FollowedSequence) -> bool:
    """Whether more was drafted for a sequence than it was given."""
    return one.prediction is not None and len(one.prediction.tokens) > one.given


def _suffix(options: Options) -> Drafter:
    return SuffixDrafter(options.suffix_min_match)


def _prompt_lookup(options: Options) -> Drafter:
    return PromptLookupDrafter(options.ngram_min, options.ngram_max)


_PARTS: dict[str, Callable[[Options], Drafter]] = {"suffix": _suffix, "ngram": _prompt_lookup}


class SuffixProposer(BackgroundProposer):
    """Drafts what followed the longest earlier occurrence of a request's end, of any length.

    Options: `suffix_min_match`, and those of every background drafter.
    """

    drafter = staticmethod(_suffix)


class PromptLookupProposer(BackgroundProposer):
    """Drafts as `NgramProposer` does, from an index that grows with the request, and ahead.

    Options: `ngram_min`, `ngram_max`, and those of every background drafter.
    """

    drafter = staticmethod(_prompt_lookup)


class CompositeProposer(BackgroundProposer):
    """Asks several drafters: one after another, or all at the same time.

    Options: `composite`, `composite_drafters`, those of the drafters, and those of every
    background drafter.
    """

    @staticmethod
    def drafter(options: Options) -> Drafter:
        """The drafters that the options name, as one."""
        parts = [_PARTS[name](options) for name in options.composite_drafters]
        return FirstDrafter(*parts) if options.composite == "first" else RaceDrafter(*parts)

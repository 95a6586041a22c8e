"""What a model gives that no engine can use costs the one who gave it, and nobody else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import attrs
import pytest
import torch

from ascend_specdecode import (
    ArgumentError,
    Completion,
    DraftedSequence,
    DrafterError,
    DraftVerify,
    EngineConfig,
    ExactVerifier,
    Failed,
    FailReason,
    Finished,
    Proposal,
    Request,
    SamplingParameters,
    Scores,
    SequenceState,
)

SIZE = 7
SAMPLED = SamplingParameters(temperature=1.0, seed=3)


def next_after(token: int) -> int:
    return (3 * token + 1) % SIZE


@attrs.define(eq=False)
class Counting:
    """A target that says the same after the same token; ``spoil`` changes the scores of a row."""

    spoil: Callable[[DraftedSequence, torch.Tensor], None] = lambda row, logits: None
    calls: int = 0

    async def score(self, batch: Sequence[DraftedSequence]) -> Scores:
        self.calls += 1
        width = 1 + max(len(row.proposal.tokens) for row in batch)
        logits = torch.zeros(len(batch), width, SIZE)
        for index, row in enumerate(batch):
            last = [int(row.sequence.verified[-1]), *row.proposal.tokens]
            for place, token in enumerate(last):
                logits[index, place, next_after(token)] = 50.0
            self.spoil(row, logits[index])
        return Scores(logits)

    def roll_back(self, sequence_id: int, length: int) -> None:
        """No state."""

    def free(self, sequence_id: int) -> None:
        """No state."""


@attrs.define(eq=False)
class SizedCounting(Counting):
    """The same, and it says how many tokens it knows."""

    vocabulary_size: int = SIZE


@attrs.define(eq=False)
class Drafting:
    """Proposes what it is told, always the same."""

    proposal: Proposal
    calls: int = 0

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        self.calls += 1
        good = [(next_after(int(one.tokens[-1])),) for one in sequences]
        # Only the second sequence gets the bad proposal.
        return [
            self.proposal if one.sequence_id == 1 else Proposal(own)
            for one, own in zip(sequences, good, strict=True)
        ]

    def forget(self, sequence_id: int) -> None:
        """No state."""


def serve(
    target: Any, requests: Sequence[Request], drafter: Any = None, **settings: Any
) -> tuple[list[Completion], DraftVerify[Scores]]:
    """Completions of the requests, which come in their order."""
    config = EngineConfig(adaptive=None, **settings)
    engine = DraftVerify(target, drafter, config, verifier=ExactVerifier())
    found: dict[int, Completion] = {}

    async def one(number: int, request: Request) -> None:
        found[number] = await engine.complete(request)

    async def main() -> None:
        async with engine, anyio.create_task_group() as group:
            for number, request in enumerate(requests):
                group.start_soon(one, number, request)

    anyio.run(main)
    return [found[number] for number in range(len(requests))], engine


def own(first: int, count: int) -> tuple[int, ...]:
    tokens = [first]
    for _ in range(count):
        tokens.append(next_after(tokens[-1]))
    return tuple(tokens[1:])


def requests(sampling: SamplingParameters = SAMPLED) -> list[Request]:
    return [Request([first], max_new_tokens=8, sampling=sampling) for first in range(3)]


@pytest.mark.parametrize("sampling", [SAMPLED, SamplingParameters()], ids=["sampled", "greedy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_without_a_possible_token_fail_their_request_only(
    sampling: SamplingParameters, value: float
) -> None:
    def spoil(row: DraftedSequence, logits: torch.Tensor) -> None:
        if row.sequence.sequence_id == 1 and row.sequence.length == 5:
            logits[0] = value

    found, engine = serve(Counting(spoil), requests(sampling))
    assert [type(one.ending) for one in found] == [Finished, Failed, Finished]
    ending = found[1].ending
    assert isinstance(ending, Failed)
    assert ending.reason is FailReason.TARGET_ERROR
    assert "no token is possible" in ending.detail
    assert "for sequence 1 at place 0" in ending.detail
    assert found[1].tokens == own(1, 4)  # what it had is exact
    assert found[0].tokens == own(0, 8)
    assert found[2].tokens == own(2, 8)
    assert engine.load.running == 0


def distribution(change: Callable[[torch.Tensor], Any] = lambda probs: None) -> torch.Tensor:
    probs = torch.full((2, SIZE), 1 / SIZE)
    change(probs)
    return probs


BAD: dict[str, Proposal] = {
    "NaN": Proposal((1, 2), distribution(lambda p: p[1].fill_(math.nan))),
    "negative": Proposal((1, 2), distribution(lambda p: p[0, 3].sub_(1.0))),
    "no sum of one": Proposal((1, 2), distribution(lambda p: p.mul_(0.5))),
    "another vocabulary": Proposal((1, 2), torch.full((2, SIZE + 1), 1 / (SIZE + 1))),
    "one row": Proposal((1, 2), torch.full((1, SIZE), 1 / SIZE)),
    "one dimension": Proposal((1, 2), torch.full((2,), 1 / SIZE)),
    "integers": Proposal((1, 2), torch.ones(2, SIZE, dtype=torch.int64)),
    "no tensor": Proposal((1, 2), [[1 / SIZE] * SIZE] * 2),  # type: ignore[arg-type]
    "no proposal": [1, 2],  # type: ignore[dict-item]
    "token beyond": Proposal((1, SIZE)),
    "token below": Proposal((1, -1)),
}


@pytest.mark.parametrize("mode", ["lockstep", "pipelined"])
@pytest.mark.parametrize("make", [Counting, SizedCounting])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_draft_costs_drafts_of_its_request_and_no_token(
    name: str, make: type[Counting], mode: str
) -> None:
    drafter = Drafting(BAD[name])
    found, engine = serve(
        make(), requests(), drafter, mode=mode, num_speculative_tokens=2, draft_failure_limit=2
    )
    for first, one in enumerate(found):
        assert isinstance(one.ending, Finished)
        assert one.tokens == own(first, 8)
    assert engine.statistics.draft_errors >= 2
    assert engine.statistics.degraded_requests == 1
    assert engine.statistics.drafts > 0  # the others are drafted all the while


@pytest.mark.parametrize("answer", [None, 7, iter(())])
def test_no_sequence_of_proposals_costs_drafts_and_no_token(answer: Any) -> None:
    class Answering(Drafting):
        async def propose(self, sequences: Sequence[SequenceState], k: int) -> Any:
            return answer

    found, engine = serve(Counting(), requests(), Answering(Proposal()), draft_failure_limit=2)
    assert [one.tokens for one in found] == [own(first, 8) for first in range(3)]
    assert engine.statistics.draft_errors == 2 * 3
    assert engine.statistics.degraded_requests == 3


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        (Drafting(Proposal()), None, "target: found Drafting without score, roll_back, free"),
        (Counting(), Counting(), "drafter: found Counting without propose, forget, allowed an obj"),
    ],
)
def test_a_part_without_its_methods_is_refused(target: Any, drafter: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DraftVerify(target, drafter)
    with pytest.raises(ArgumentError, match="verifier: found Counting without verify"):
        DraftVerify(Counting(), None, verifier=Counting())  # type: ignore[arg-type]


def test_control_a_good_draft_is_no_error() -> None:
    good = Proposal((1, 2), distribution())
    _, engine = serve(Counting(), requests(), Drafting(good), num_speculative_tokens=2)
    assert engine.statistics.draft_errors == 0


def test_a_verifier_that_refuses_drafts_that_there_are_not_fails_its_batch() -> None:
    class Refusing(ExactVerifier):
        async def verify(self, batch: Any, scores: Scores) -> Any:
            raise DrafterError("never enough", [row.sequence.sequence_id for row in batch])

    engine = DraftVerify(Counting(), None, EngineConfig(), verifier=Refusing())

    async def main() -> Completion:
        async with engine:
            return await engine.complete(requests()[0])

    ending = anyio.run(main).ending
    assert isinstance(ending, Failed)
    assert ending.reason is FailReason.VERIFIER_ERROR
    assert "drafts were refused that there are not" in ending.detail


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1, SIZE]), r"prompt: found token 7, allowed token ids 0..V-1 \(V = 7"),
        (
            Request([1], sampling=SamplingParameters(logit_bias={SIZE: 1.0})),
            "logit_bias: found token 7, allowed",
        ),
    ],
)
def test_tokens_that_the_target_does_not_know_are_refused_at_once(
    request_: Request, message: str
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        serve(SizedCounting(), [request_])
    inner = caught.value
    while isinstance(inner, ExceptionGroup):
        (inner,) = inner.exceptions
    assert isinstance(inner, ArgumentError)
    with pytest.raises(ArgumentError, match=message):
        raise inner


def test_a_bias_beyond_the_vocabulary_fails_its_request_only() -> None:
    """Where the target does not say how many tokens it knows, its scores do."""
    biased = Request([1], 8, SamplingParameters(logit_bias={SIZE: 1.0}))
    found, _ = serve(Counting(), [requests()[0], biased])
    assert found[0].tokens == own(0, 8)
    ending = found[1].ending
    assert isinstance(ending, Failed)
    assert "logit_bias: found tokens [7], allowed 0..6" in ending.detail


def test_a_request_that_no_memory_can_hold_is_refused_and_others_go_on() -> None:
    limits = {"max_cached_tokens": 12, "num_speculative_tokens": 0}
    with pytest.raises(ExceptionGroup) as caught:
        serve(Counting(), [Request([0] * 10, max_new_tokens=3)], **limits)
    assert "at most max_cached_tokens (12)" in repr(caught.value.exceptions)
    found, engine = serve(
        Counting(), [Request([first] * 2, max_new_tokens=8) for first in range(5)], **limits
    )
    assert [one.tokens for one in found] == [own(first, 8) for first in range(5)]
    assert engine.load.cached_tokens == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_drafter_that_never_answers_is_given_up(backend: str) -> None:
    class Hanging(Drafting):
        async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
            await anyio.sleep_forever()
            raise AssertionError

    engine = DraftVerify(
        Counting(),
        Hanging(Proposal()),
        EngineConfig(adaptive=None, draft_time_limit=0.01, draft_failure_limit=2),
    )

    async def main() -> Completion:
        async with engine:
            return await engine.complete(requests()[0])

    assert anyio.run(main, backend=backend).tokens == own(0, 8)
    assert engine.statistics.draft_timeouts == 2
    assert engine.statistics.degraded_requests == 1


def test_a_thousand_requests_share_one_engine() -> None:
    many = [Request([row % SIZE], max_new_tokens=4, sampling=SAMPLED) for row in range(1000)]
    settings = {"max_num_seqs": 300, "max_waiting": 50, "num_speculative_tokens": 3}
    found, engine = serve(Counting(), many, Drafting(Proposal((1,))), **settings)
    assert all(one.tokens == own(row % SIZE, 4) for row, one in enumerate(found))
    assert engine.statistics.endings == {("finished", "length"): 1000}

"""Proposers that draft ahead, driven as vLLM drives them.

Time stands still unless a test moves it, and drafters wait for events: nothing here depends on how
fast the machine is.
"""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ascend_specdecode import Proposal
from ascend_vllm_plugin import (
    BackgroundProposer,
    CompositeProposer,
    OptionError,
    PromptLookupProposer,
    SuffixProposer,
)

PATIENCE = 30.0
TEXT = [5, 6, 7, 8, 9, 1, 2, 3, 4] * 8


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def config(k=3, max_model_len=64, **options):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        additional_config={"ascend": options},
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, data_parallel_index=0),
        instance_id="abcde",
    )


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Oracle:
    """Knows the text and drafts it; may be held up, told to fail, or told to lie."""

    def __init__(self, text=TEXT):
        self.text = list(text)
        self.go = threading.Event()
        self.go.set()
        self.error = None
        self.calls = []
        self.forgotten = []

    async def propose(self, sequences, k):
        self.calls.append(([len(sequence) for sequence in sequences], k))
        while not self.go.is_set():
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        return [
            Proposal(tuple(self.text[len(sequence) : len(sequence) + k])) for sequence in sequences
        ]

    def forget(self, sequence_id):
        self.forgotten.append(sequence_id)


class Runner:
    """A model runner whose target says a text, with a proposer whose drafter is `oracle`."""

    def __init__(self, oracle=None, waits_for=PATIENCE, proposer=None, **options):
        self.oracle = Oracle() if oracle is None else oracle
        self.clock, self.limits = Clock(), []
        made = type("OracleProposer", (BackgroundProposer,), {"drafter": lambda _, o: self.oracle})
        options = {"draft_deadline_ms": 5, **options}
        k = options.pop("k", 3)
        self.waits_for = waits_for
        self.proposer = (proposer or made)(config(k, **options), clock=self.clock, wait=self._wait)
        self.rows = []

    def _wait(self, event, seconds):
        self.limits.append(seconds)
        return event.wait(self.waits_for)

    def add(self, prompt=4, text=TEXT):
        self.rows.append(SimpleNamespace(text=text, length=prompt, draft=[], new=True))
        return self.rows[-1]

    def step(self, says=None):
        """Verify the drafts, sample, and ask for the next; returns the drafts of all rows."""
        sampled = [self._verify(row, says) for row in self.rows]
        tokens = np.full((len(self.rows) + 2, 96), 7, dtype=np.int32)
        lengths = np.zeros(len(self.rows) + 2, dtype=np.int32)
        for index, row in enumerate(self.rows):
            tokens[index, : row.length] = row.text[: row.length]
            lengths[index] = row.length
        drafts = self.proposer.propose(sampled, lengths, tokens)
        for row, draft in zip(self.rows, drafts, strict=True):
            row.draft = draft
        return drafts

    def _verify(self, row, says):
        if says is not None:
            row.text = [*row.text[: row.length], *says]
        right = 0
        for drafted in row.draft:
            if drafted != row.text[row.length + right]:
                break
            right += 1
        row.length += right + 1
        return row.text[row.length - right - 1 : row.length]

    def settle(self):
        """Let the drafter finish what it began ahead."""
        if self.proposer._job is not None:
            assert self.proposer._job.done.wait(PATIENCE)

    def count(self, name):
        return self.proposer.counters.as_dict()[name]


@pytest.fixture
def run(request):
    made = []

    def make(**arguments):
        made.append(Runner(**arguments))
        return made[-1]

    yield make
    for runner in made:
        runner.oracle.go.set()
        runner.proposer.close()


def test_the_next_draft_is_there_when_the_target_follows(run):
    runner = run()
    runner.add(prompt=4)
    assert runner.step() == [TEXT[5:8]]  # in the step: nobody knew the sequence before
    for length in (9, 13, 17):
        runner.settle()
        assert runner.step() == [TEXT[length : length + 3]]
    assert len(runner.limits) == 1  # only the first step waited
    assert (runner.count("num_waited_drafts"), runner.count("num_ahead_drafts")) == (1, 3)
    assert runner.count("num_late_drafts") == runner.count("num_discarded_drafts") == 0
    assert runner.count("num_speculative_tokens") == 3


def test_a_target_that_goes_elsewhere_gets_a_new_draft(run):
    runner = run()
    runner.add(prompt=4)
    runner.step()
    runner.settle()
    assert runner.step(says=[40] * 60) == [TEXT[6:9]]  # what the oracle says at this length
    assert runner.count("num_discarded_drafts") == 1
    assert (runner.count("num_waited_drafts"), runner.count("num_ahead_drafts")) == (2, 0)


def test_a_late_draft_is_skipped_counted_and_blocks_nothing(run):
    runner = run(waits_for=0.0)
    runner.oracle.go.clear()
    runner.add(prompt=4)
    runner.add(prompt=6)
    assert runner.step() == [[], []]
    assert runner.limits == [pytest.approx(0.005)]
    assert runner.count("num_late_drafts") == 2
    assert runner.step() == [[], []]
    assert runner.count("num_late_drafts") == 4
    runner.oracle.go.set()
    runner.settle()
    assert runner.oracle.calls == [([5, 7], 3)]  # no second call was begun behind it


def test_a_late_draft_is_used_later_if_it_still_holds(run):
    runner = run(waits_for=0.0, k=4)
    runner.oracle.go.clear()
    runner.add(prompt=4)
    assert runner.step() == [[]]
    runner.oracle.go.set()
    runner.settle()
    assert runner.step() == [TEXT[6:9]]  # drafted as TEXT[5:9]; the target said TEXT[5] itself
    assert runner.count("num_ahead_drafts") == 1


def test_a_late_draft_that_no_longer_holds_is_not_used(run):
    runner = run(waits_for=0.0)
    runner.oracle.go.clear()
    row = runner.add(prompt=4)
    runner.step()
    runner.oracle.go.set()
    runner.settle()
    runner.oracle.go.clear()
    row.text = [*TEXT[:5], *[40] * 60]
    assert runner.step() == [[]]
    assert runner.count("num_late_drafts") == 2


def test_the_time_that_a_step_has_spent_is_not_waited_again(run):
    runner = run(draft_deadline_ms=8)
    runner.add(prompt=4)
    runner.step()
    runner.settle()
    original = runner.proposer._followed.follow

    def slow(*arguments):
        runner.clock.now += 0.006
        return original(*arguments)

    runner.proposer._followed.follow = slow
    runner.step(says=[40] * 60)
    assert runner.limits == [pytest.approx(0.008), pytest.approx(0.002)]


def test_no_deadline_at_all_uses_only_what_is_ready(run):
    runner = run(draft_deadline_ms=0, waits_for=0.0)
    runner.oracle.go.clear()
    runner.add(prompt=4)
    runner.step()
    assert runner.limits == [0.0]


def test_a_failing_drafter_is_counted_logged_and_costs_only_its_drafts(run, caplog):
    runner = run()
    runner.oracle.error = RuntimeError("out of ink")
    runner.add(prompt=4)
    with caplog.at_level("WARNING", logger="vllm.ascend_vllm_plugin"):
        assert runner.step() == [[]]
    assert "out of ink" in caplog.text
    assert runner.count("num_draft_errors") == 1
    assert runner.count("num_late_drafts") == 0
    runner.oracle.error = None
    assert runner.step() == [TEXT[6:9]]


def test_a_drafter_that_returns_too_few_proposals_is_an_error(run):
    class Silent(Oracle):
        async def propose(self, sequences, k):
            return []

    runner = run(oracle=Silent())
    runner.add(prompt=4)
    assert runner.step() == [[]]
    assert runner.count("num_draft_errors") == 1


def test_requests_keep_their_drafts_when_rows_move(run):
    runner = run()
    runner.add(prompt=4)
    other = [1, 3, 5, 7] * 20
    runner.oracle.text = TEXT
    second = runner.add(prompt=11, text=other)
    runner.step()
    runner.settle()
    runner.rows = [second]  # the first request ended, the second moved into its row
    runner.step()
    assert len(runner.proposer._followed) == 2
    runner.add(prompt=4)
    runner.step()
    assert len(runner.proposer._followed) == 3


def test_sequences_that_are_gone_are_forgotten(run):
    runner = run()
    runner.add(prompt=4)
    runner.step()
    runner.rows.clear()
    runner.add(prompt=20)
    for _ in range(20):
        runner.rows[0].length = min(runner.rows[0].length, 40)
        runner.settle()
        runner.step()
    runner.settle()
    assert 0 in runner.oracle.forgotten


def test_nothing_is_drafted_while_a_prompt_is_incomplete(run):
    runner = run()
    tokens = np.array([TEXT[:20]], dtype=np.int32)
    assert runner.proposer.propose([[]], np.array([20], dtype=np.int32), tokens) == [[]]
    assert runner.oracle.calls == []


@pytest.mark.parametrize(("length", "drafts"), [(60, 3), (62, 2), (63, 1), (64, 0)])
def test_drafts_never_reach_beyond_the_model(length, drafts, run):
    runner = run()
    runner.add(prompt=length - 1)
    assert runner.step() == [TEXT[length : length + drafts]]


def test_adaptive_k_stops_drafting_what_is_never_accepted_and_fixed_k_does_not(run):
    shown = {}
    for adaptive in (True, False):
        runner = run(adaptive_k=adaptive, max_model_len=10_000)
        runner.oracle.text = [99] * 10_000
        runner.add(prompt=4)
        drafted = 0
        for _ in range(48):
            drafted += bool(runner.step()[0])
            runner.settle()
            runner.clock.now += 0.010 + 0.004 * len(runner.rows[0].draft)
        shown[adaptive] = drafted
    assert shown[False] == 48
    assert shown[True] <= 16


def test_adaptive_k_grows_where_drafts_are_accepted(run):
    runner = run(adaptive_k=True)
    runner.add(prompt=4)
    ks = []
    while runner.rows[0].length < 50:
        runner.step()
        runner.settle()
        runner.clock.now += 0.010
        ks.append(runner.count("num_speculative_tokens"))
    assert ks[:3] == [0, 0, 0]  # plain steps, to know what they cost
    assert ks[-1] == 3


@pytest.mark.parametrize(
    ("proposer", "options"),
    [
        (SuffixProposer, {}),
        (PromptLookupProposer, {}),
        (CompositeProposer, {"composite": "first"}),
        (CompositeProposer, {"composite": "race", "composite_drafters": ["ngram"]}),
    ],
)
def test_proposers_draft_the_repetition(proposer, options):
    runner = Runner(proposer=proposer, k=4, **options)
    runner.add(prompt=14)
    lengths = []
    for _ in range(6):
        (draft,) = runner.step()
        lengths.append(len(draft))
        assert draft == TEXT[runner.rows[0].length :][: len(draft)]
        runner.settle()
    runner.proposer.close()
    assert lengths == [4] * 6


def test_the_shortest_match_is_an_option():
    text = [1, 2, 9, 4, 2, 0]
    for shortest, drafted in ((1, [9, 4, 2]), (2, [])):
        runner = Runner(proposer=SuffixProposer, suffix_min_match=shortest)
        runner.add(prompt=4, text=text)
        assert runner.step() == [drafted]
        runner.proposer.close()


def test_needs_a_number_of_draft_tokens():
    with pytest.raises(ValueError, match=r"SuffixProposer needs .*num_speculative_tokens"):
        SuffixProposer(config(k=None))


def test_wrong_options_are_refused():
    with pytest.raises(OptionError, match=r"ascend\.composite_drafters"):
        CompositeProposer(config(composite_drafters=["suffix", "eagle"]))

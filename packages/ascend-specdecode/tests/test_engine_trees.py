"""Trees in the engine: the target's own tokens, the target's distribution, and who takes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest
import torch
from drafter_support import FakeModel, logits_after
from engine_support import both_loops, both_modes, complete, engine_of, is_whole, settings
from speculation_support import START, VOCABULARY, WATCHED, chi_square, joint, tables

from ascend_specdecode import (
    AdaptiveConfig,
    AdaptiveK,
    ArgumentError,
    DraftDraws,
    DraftedSequence,
    DraftTree,
    DraftVerify,
    DraftVocabulary,
    EngineConfig,
    ExactVerifier,
    FirstDrafter,
    InexactTypicalVerifier,
    ModelDrafter,
    PromptLookupDrafter,
    Proposal,
    Purpose,
    Request,
    SamplingParameters,
    Scores,
    SequenceState,
    SuffixDrafter,
    TreeDrafter,
    TreeOfDrafts,
    TreeTarget,
    TreeVerifier,
    distinct_sibling_probs,
    inverse_cdf,
    uniforms,
)
from ascend_specdecode.drafted_paths import kept
from ascend_specdecode.drafters.composite import joined
from ascend_specdecode.orchestrator import step
from ascend_specdecode.simulator import SimulatedDrafter, SimulatedTarget, SimulatedVerifier

REQUESTS = [Request([number, 3, 4, 5][: number + 1], max_new_tokens=12) for number in range(4)]


# Greedy: the target's own tokens.


@both_loops
@both_modes
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", range(9))
def test_output_is_the_targets_own(backend: Any, mode: str, chance: float, k: int) -> None:
    target = SimulatedTarget(lambda batch: 1.0)
    drafter = SimulatedDrafter(chance, lambda k, rows: 0.1 * k, branches=2 + k % 2)
    engine = engine_of(settings(mode=mode, num_speculative_tokens=k), target, drafter)
    found = complete(engine, REQUESTS, backend)
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))
    assert target.violations == drafter.violations == []
    assert engine.statistics.draft_errors == 0
    if k > 1:  # the second branch is right wherever the first is not
        assert engine.statistics.acceptance_length > 1.2


@both_loops
@both_modes
@pytest.mark.parametrize("adaptive", [None, AdaptiveConfig(warm_up=1)])
def test_tight_limits_change_no_token(
    backend: Any, mode: str, adaptive: AdaptiveConfig | None
) -> None:
    """Accepted tokens that are computed again need positions of their own: there are few."""
    config = EngineConfig(
        mode=mode,
        adaptive=adaptive,
        num_speculative_tokens=4,
        max_num_seqs=3,
        max_num_batched_tokens=5,
        max_cached_tokens=26,
        prefill_chunk=2,
        max_queued_events=1,
    )
    widest = 0

    class Measured(SimulatedTarget):
        async def score(self, batch: Sequence[DraftedSequence]) -> Any:
            nonlocal widest
            ends = [row.sequence.length + len(row.proposal.tokens) for row in batch]
            computed = [end - row.cached_length for end, row in zip(ends, batch, strict=True)]
            widest = max(widest, sum(computed))
            return await super().score(batch)

    target = Measured(lambda batch: 1.0)
    engine = engine_of(config, target, SimulatedDrafter(0.5, branches=3))
    found = complete(engine, REQUESTS, backend)
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))
    assert target.violations == []
    assert widest <= config.max_num_batched_tokens


def test_a_path_beside_the_first_is_computed_again_and_not_copied() -> None:
    """The second branch is always the right one: its state is not where the sequence has it."""
    lags = []

    class Watching(SimulatedTarget):
        async def score(self, batch: Sequence[DraftedSequence]) -> Any:
            lags.extend(row.sequence.length - row.cached_length for row in batch)
            return await super().score(batch)

    engine = engine_of(
        settings(num_speculative_tokens=3), Watching(), SimulatedDrafter(0.0, branches=2)
    )
    (found,) = complete(engine, REQUESTS[:1], "asyncio")
    assert is_whole(found, REQUESTS[0])
    assert set(lags) == {1, 2}
    # Always accepted, but for the last draft, where there is room for one token only.
    assert engine.statistics.accepted[0] == engine.statistics.drafts - 1
    assert engine.statistics.drafted[0] == 2 * engine.statistics.drafts - 1


@pytest.mark.parametrize("mode", ["lockstep", "pipelined"])
def test_control_state_that_is_taken_for_kept_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(step, "kept", lambda proposal, tokens: len(tokens) - 1)
    target = SimulatedTarget(lambda batch: 1.0)
    drafter = SimulatedDrafter(0.3, branches=2)
    complete(engine_of(settings(mode=mode), target, drafter), REQUESTS, "asyncio")
    assert any("holds other tokens than the sequence" in text for text in target.violations)


def test_control_a_tree_that_is_scored_as_a_chain_is_noticed() -> None:
    class Blind(SimulatedTarget):
        def _row(self, row: DraftedSequence) -> list[int]:
            chain = Proposal(row.proposal.tokens)
            return super()._row(attrs.evolve(row, proposal=chain))

    found = complete(
        engine_of(settings(), Blind(), SimulatedDrafter(0.5, branches=2)), REQUESTS, "asyncio"
    )
    assert not all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))


@both_modes
def test_drafts_made_ahead_go_on_below_the_token_that_came(mode: str) -> None:
    """The guess of the bonus token is a root of the next tree: two guesses, one of them right."""
    engine = engine_of(
        settings(mode=mode, num_speculative_tokens=4),
        drafter=SimulatedDrafter(1.0, lambda k, rows: 0.1, branches=2),
    )
    found = complete(engine, REQUESTS, "trio")
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))
    assert (engine.statistics.ahead_used > 0) == (mode == "pipelined")


def test_adaptive_drafts_trees_whole_or_not_at_all() -> None:
    asked = set()

    class Watching(SimulatedDrafter):
        async def propose(self, sequences: Sequence[SequenceState], k: int) -> Any:
            if len(sequences[0]) < 110:  # later there is no room for all
                asked.add(k)
            return await super().propose(sequences, k)

    for chance, cost in ((1.0, 0.01), (0.0, 5.0)):
        drafter = Watching(chance, lambda k, rows, cost=cost: cost * k, branches=2)
        request = Request([1], max_new_tokens=120)
        engine = engine_of(EngineConfig(num_speculative_tokens=6), drafter=drafter)
        (found,) = complete(engine, [request], "asyncio")
        assert is_whole(found, request)
        assert engine.speculation().k == (6 if chance else 0)
        assert engine.speculation().break_even is None
        assert engine.statistics.plain_rows > (0 if chance else 90)
    assert asked == {6}


def test_policy_of_trees_knows_their_depth() -> None:
    policy = AdaptiveK(8, AdaptiveConfig(warm_up=1), trees=True)
    assert policy.row_limit(0.9) == 8
    assert policy.guess_holds(8, accepted=True) == pytest.approx(0.6)


# Sampled: the target's distribution.


@attrs.define(eq=False)
class TableTarget:
    """A target whose logits follow from the last token; scores chains and trees."""

    logits: torch.Tensor
    scores_trees: bool = True
    vocabulary_size: int = VOCABULARY

    async def score(self, batch: Sequence[DraftedSequence]) -> Scores:
        width = 1 + max(len(row.proposal.tokens) for row in batch)
        last = torch.zeros(len(batch), width, dtype=torch.int64)
        for index, row in enumerate(batch):
            tokens = [int(row.sequence.verified[-1]), *row.proposal.tokens]
            last[index, : len(tokens)] = torch.tensor(tokens)
        return Scores(self.logits[last])

    def roll_back(self, sequence_id: int, length: int) -> None:
        """No state."""

    def free(self, sequence_id: int) -> None:
        """No state."""


PARENTS = (-1, 0, -1, 0, 2, 2, -1)


@attrs.frozen(eq=False)
class TableTrees:
    """Samples trees from a table: siblings are independent samples, or distinct ones."""

    probabilities: torch.Tensor
    drawn: str
    claimed: str
    drafts_trees: bool = True

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        parents = torch.tensor(PARENTS[:k]).expand(len(sequences), -1)
        tokens = torch.zeros_like(parents).clone()
        tree = DraftTree(tokens, parents, torch.full((len(sequences),), parents.shape[1]))
        last = torch.tensor([int(one.tokens[-1]) for one in sequences])
        seeds = torch.tensor([one.seed for one in sequences])
        positions = torch.tensor([len(one) for one in sequences])
        probs = torch.zeros(*tokens.shape, VOCABULARY)
        for node, parent in enumerate(PARENTS[:k]):
            probs[:, node] = self.probabilities[last if parent < 0 else tokens[:, parent]]
            weights = distinct_sibling_probs(tree, probs) if self.drawn == "distinct" else probs
            numbers = uniforms(seeds, positions, Purpose.DRAFT, node)
            tokens[:, node] = inverse_cdf(weights[:, node], numbers)
        given = {"distinct": distinct_sibling_probs(tree, probs), "independent": probs}
        rows = given.get(self.claimed)
        return [
            Proposal(tuple(own), None if rows is None else rows[index], PARENTS[:k])
            for index, own in enumerate(tokens.tolist())
        ]

    def forget(self, sequence_id: int) -> None:
        """No state."""


def sampled_streams(drafter: Any, mode: str, count: int, **sampling: Any) -> torch.Tensor:
    """The first tokens of requests with the seeds 0..count-1: [count, WATCHED]."""
    found = torch.full((count, WATCHED), -1)
    config = settings(
        mode=mode, num_speculative_tokens=len(PARENTS), max_num_seqs=500, max_waiting=count
    )

    async def one(engine: DraftVerify[Any], seed: int) -> None:
        parameters = SamplingParameters(seed=seed, **sampling)
        request = Request([START], max_new_tokens=WATCHED + 3, sampling=parameters)
        found[seed] = torch.tensor((await engine.complete(request)).tokens[:WATCHED])

    async def main() -> None:
        target = TableTarget(tables()[0])
        async with DraftVerify(target, drafter, config) as engine:
            async with anyio.create_task_group() as group:
                for seed in range(count):
                    group.start_soon(one, engine, seed)
            assert engine.statistics.draft_errors == 0
            assert engine.statistics.acceptance_length > 1.2

    anyio.run(main)
    return found


KINDS = [("independent", "independent"), ("distinct", "distinct"), ("distinct", "none")]


@both_modes
@pytest.mark.parametrize(("drawn", "claimed"), KINDS)
def test_sampled_trees_have_the_targets_distribution(mode: str, drawn: str, claimed: str) -> None:
    target, drafter = tables()
    trees = TableTrees(drafter.softmax(-1), drawn, claimed)
    found = sampled_streams(trees, mode, 3000, temperature=0.8)
    assert chi_square(found, joint((target.double() / 0.8).softmax(-1))) > 1e-4
    assert chi_square(found, joint(target.double().softmax(-1))) < 1e-8  # control


def test_control_siblings_of_another_kind_than_claimed_are_seen() -> None:
    target, drafter = tables()
    trees = TableTrees(drafter.softmax(-1), "distinct", "independent")
    found = sampled_streams(trees, "lockstep", 3000, temperature=1.0)
    assert chi_square(found, joint(target.double().softmax(-1))) < 1e-8


class TableModel:
    """A draft model from a table; no state, so it is a drafter of trees and of chains."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    async def next_logits(self, rows: Sequence[Any]) -> torch.Tensor:
        return self.logits[torch.tensor([int(row.tokens[-1]) for row in rows])]

    def free(self, sequence_id: int) -> None:
        """No state."""


@pytest.mark.parametrize("branches", [2, 3])
def test_sampled_trees_of_a_model_have_the_targets_distribution(branches: int) -> None:
    target, drafter = tables()
    found = sampled_streams(
        ModelDrafter(TableModel(drafter), branches=branches), "lockstep", 3000, temperature=0.8
    )
    assert chi_square(found, joint((target.double() / 0.8).softmax(-1))) > 1e-4


def test_penalties_count_the_tokens_above_and_no_siblings() -> None:
    """A tree's rows equal those of each of its paths as a chain."""
    sampling = SamplingParameters(temperature=0.7, frequency_penalty=1.5, repetition_penalty=1.3)
    tokens = (1, 1, 2, 1, 5)
    parents = (-1, 0, -1, 2, 3)
    state = SequenceState.of([1, 4, 5], 0, sampling, prompt_length=1)
    logits = torch.randn(1, 6, VOCABULARY, generator=torch.Generator().manual_seed(3))
    sampler = ExactVerifier().sampler
    tree = sampler.probabilities(
        [DraftedSequence(state, Proposal(tokens, parents=parents))], logits
    )[0]
    for path in ([0, 1], [2, 3, 4]):
        chain = Proposal(tuple(tokens[node] for node in path))
        rows = logits[:, [0, *(node + 1 for node in path)]]
        own = sampler.probabilities([DraftedSequence(state, chain)], rows)[0]
        assert torch.equal(tree[[0, *(node + 1 for node in path)]], own)
    assert not torch.equal(tree[3], tree[2])  # the sibling does not count here, its own path does


# The drafters.


def test_a_model_drafts_its_likely_tokens_beside_the_path() -> None:
    model = FakeModel()
    drafter = ModelDrafter(model, branches=3)
    (found,) = anyio.run(drafter.propose, [SequenceState.of([1, 2, 3])], 7)
    assert len(model.inputs) == 3  # calls: the places of a tree of seven tokens
    path, context = [], [1, 2, 3]
    for _ in range(3):
        path.append(int(model.alone([*context, *path]).argmax()))
    assert found.tokens[:3] == tuple(path)
    second = model.alone(context).topk(3).indices.tolist()[1:]
    assert found.tokens[3:5] == tuple(second)
    assert found.parents == (-1, 0, 1, -1, -1, 0, 0)
    assert drafter.drafts_trees
    assert not ModelDrafter(model).drafts_trees
    with pytest.raises(ArgumentError, match="branches: found 0, allowed an integer >= 1"):
        ModelDrafter(model, branches=0)


def test_siblings_are_distinct_and_say_what_they_were_drawn_from() -> None:
    vocabulary = DraftVocabulary(torch.tensor([2, 5, 7]), 9)
    sampled = SequenceState.of([1], 0, SamplingParameters(temperature=1.0), seed=4)
    greedy = SequenceState.of([1], 1)
    logits = torch.stack([logits_after(1, 3), logits_after(2, 3)])
    first, second = DraftDraws(vocabulary=vocabulary).draw_siblings(
        [sampled, greedy], [1, 1], logits, 5
    )
    assert {token for token, _ in first} == {token for token, _ in second} == {2, 5, 7}
    assert [given for _, given in second] == [None] * 3
    left = logits[0].softmax(-1)
    for token, given in first:
        assert given is not None
        assert torch.allclose(given[[2, 5, 7]], left / left.sum(), atol=1e-6)
        left = left.clone()
        left[[2, 5, 7].index(token)] = 0.0


def test_drafts_join_to_one_tree() -> None:
    found = joined([Proposal((1, 2, 3, 4)), Proposal((1, 5)), Proposal(()), Proposal((6, 7))], 6)
    assert found.tokens == (1, 2, 3, 5, 6, 7)
    assert found.parents == (-1, 0, 1, 0, -1, 4)
    assert joined([found], 6).tokens == found.tokens  # a tree stays what it is
    assert joined([Proposal((1, 2, 3)), Proposal((4, 5, 6))], 3).tokens == (1, 2, 4)
    assert joined([Proposal(()), Proposal(())], 3).tokens == ()


def test_a_tree_of_drafts_asks_all_and_stands_failures() -> None:
    class Failing(PromptLookupDrafter):
        async def propose(self, sequences: Any, k: int) -> Any:
            raise ValueError("no")

    sequence = SequenceState.of([1, 2, 3, 1, 2, 4, 1, 2])
    drafter = TreeOfDrafts(SuffixDrafter(), Failing(), PromptLookupDrafter(1, 1))
    (found,) = anyio.run(drafter.propose, [sequence], 4)
    assert found.tokens[0] == 4
    assert drafter.failures == (0, 1, 0)
    with pytest.raises(ValueError, match="no"):
        anyio.run(TreeOfDrafts(Failing(), Failing()).propose, [sequence], 4)


@pytest.mark.parametrize("branches", [1, 2])
def test_a_seeded_request_repeats_whoever_shares_its_batch(branches: int) -> None:
    target, table = tables()
    found = []
    for others in (0, 7):
        drafter = ModelDrafter(TableModel(table), branches=branches)
        sampling = SamplingParameters(temperature=0.9, seed=5)
        beside = [Request([other % VOCABULARY], max_new_tokens=9) for other in range(others)]
        wanted = Request([START], max_new_tokens=15, sampling=sampling)
        engine = DraftVerify(TableTarget(target), drafter, settings(num_speculative_tokens=4))
        found.append(complete(engine, [*beside, wanted], "asyncio")[-1].tokens)
    assert len(found[0]) == 15
    assert found[0] == found[1]


# Who takes none.


def test_who_takes_trees_says_so() -> None:
    target, drafter = SimulatedTarget(), SimulatedDrafter(branches=2)
    assert isinstance(target, TreeTarget)
    assert isinstance(SimulatedVerifier(), TreeVerifier)
    assert isinstance(drafter, TreeDrafter)
    assert FirstDrafter(PromptLookupDrafter(), drafter).drafts_trees
    assert not FirstDrafter(PromptLookupDrafter(), SuffixDrafter()).drafts_trees
    with pytest.raises(ArgumentError, match="verifier: found InexactTypicalVerifier, which takes"):
        DraftVerify(TableTarget(torch.zeros(2, 2)), drafter, verifier=InexactTypicalVerifier())
    chains = TableTarget(torch.zeros(2, 2), scores_trees=False)
    with pytest.raises(ArgumentError, match="target: found TableTarget, which takes no trees"):
        DraftVerify(chains, drafter)
    DraftVerify(chains, SimulatedDrafter())


@pytest.mark.parametrize(
    ("branches", "proposal"),
    [
        (1, Proposal((1, 2), parents=(-1, -1))),
        (2, Proposal((1, 2), parents=(-1, 1))),
        (2, Proposal((1, 2), parents=(-1,))),
    ],
)
def test_a_tree_that_is_none_costs_drafts_and_no_token(branches: int, proposal: Proposal) -> None:
    class Wrong(SimulatedDrafter):
        async def propose(self, sequences: Sequence[SequenceState], k: int) -> Any:
            return [proposal] * len(sequences)

    engine = engine_of(settings(draft_failure_limit=2), drafter=Wrong(branches=branches))
    found = complete(engine, REQUESTS, "asyncio")
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))
    assert engine.statistics.draft_errors == 2 * len(REQUESTS)
    assert kept(proposal, (9,)) == 0

"""What is emitted has the target's distribution: chi-square over the first three tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speculation_support import (
    SETTINGS,
    START,
    VOCABULARY,
    Emit,
    Setting,
    chi_square,
    draft,
    expected_rows,
    joint,
    linear_step,
    streams,
    tables,
)

from ascend_specdecode import (
    DraftTree,
    InverseCdf,
    Purpose,
    distinct_sibling_probs,
    inverse_cdf,
    rejection_sample,
    rejection_sample_tree,
    rejection_sample_with,
    shaped_probabilities,
    typical_acceptance_inexact,
    uniforms,
)

TRIALS = 12_000
PASSES = 1e-4  # seeds are fixed: the smallest p-value of 49 exact runs is 0.03
FAILS = 1e-8  # and the largest of 9 biased ones is below 1e-100


def exact(
    tokens: torch.Tensor,
    target: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    return rejection_sample(tokens, target, draft_probs, seeds=seeds, positions=positions)


def target_rows(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """The distributions as the package makes them from logits: [V, V] float32."""
    one = [setting.temperature], [setting.top_k], [setting.top_p]
    return shaped_probabilities(logits.unsqueeze(0), *one)[0]


def p_value(setting: Setting, emit: Emit, *, with_probs: bool) -> float:
    target, drafter = tables()
    drafted_from = drafter.softmax(-1)
    rows = target_rows(target, setting)
    step = linear_step(rows, drafted_from, setting.k, emit, with_probs=with_probs)
    return chi_square(streams(step, TRIALS), joint(expected_rows(target, setting)))


@pytest.mark.parametrize("with_probs", [True, False], ids=["draft-probs", "point-mass"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rejection_sampling_has_the_targets_distribution(
    setting: Setting, with_probs: bool
) -> None:
    assert p_value(setting, exact, with_probs=with_probs) > PASSES


def forget_the_residual(*arguments: Any) -> torch.Tensor:
    """Broken: a rejected token is replaced by a sample of the target instead of the residual."""
    _, target, _, seeds, positions = arguments
    emitted = exact(*arguments)
    last = (emitted >= 0).sum(dim=1) - 1
    numbers = uniforms(seeds, positions + last, Purpose.CHOOSE)
    again = inverse_cdf(target[torch.arange(len(last)), last], numbers)
    return emitted.scatter(1, last.unsqueeze(1), again.unsqueeze(1))


def accept_a_little_more(*arguments: Any) -> torch.Tensor:
    """Broken: a drafted token is accepted with probability p / q + 0.05."""
    tokens, target, draft_probs, seeds, positions = arguments
    at = positions.unsqueeze(1) + torch.arange(tokens.shape[1] + 1)
    accept = uniforms(seeds.unsqueeze(1), at[:, :-1], Purpose.ACCEPT) - 0.05
    choose = InverseCdf(uniforms(seeds.unsqueeze(1), at, Purpose.CHOOSE))
    counts = torch.full((len(tokens),), tokens.shape[1])
    return rejection_sample_with(tokens, target, draft_probs, counts, accept, choose)


def use_numbers_again(*arguments: Any) -> torch.Tensor:
    """Broken: every step of a request is taken for its first one."""
    tokens, target, draft_probs, seeds, positions = arguments
    return exact(tokens, target, draft_probs, seeds, torch.zeros_like(positions))


def accept_what_is_typical(*arguments: Any) -> torch.Tensor:
    """Typical acceptance, which says itself that it is not exact."""
    tokens, target, _, seeds, positions = arguments
    found = typical_acceptance_inexact(tokens, target, seeds=seeds, positions=positions)
    assert found.exact is False
    return found.tokens


@pytest.mark.parametrize("with_probs", [True, False], ids=["draft-probs", "point-mass"])
@pytest.mark.parametrize(
    "broken",
    [forget_the_residual, accept_a_little_more, use_numbers_again, accept_what_is_typical],
)
def test_a_biased_verifier_is_seen(broken: Emit, with_probs: bool) -> None:
    setting = Setting(1.0, 0, 1.0, 1)
    assert p_value(setting, exact, with_probs=with_probs) > PASSES
    assert p_value(setting, broken, with_probs=with_probs) < FAILS


def test_probabilities_of_another_drafter_are_seen() -> None:
    """Exactness needs the distribution that the tokens were really sampled from."""

    def wrong_probs(*arguments: Any) -> torch.Tensor:
        tokens, target, draft_probs, seeds, positions = arguments
        return exact(tokens, target, draft_probs.flip(-1), seeds, positions)

    assert p_value(Setting(1.0, 0, 1.0, 2), wrong_probs, with_probs=True) < FAILS


@pytest.mark.parametrize("k", [1, 4])
def test_a_better_drafter_is_accepted_more(k: int) -> None:
    """Exactness alone would also hold for a verifier that accepts nothing."""
    counts = []
    for likeness in (0.0, 1.0):
        target, drafter = tables(likeness=likeness)
        seeds, zeros = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
        last = torch.full((2000,), START)
        tokens, probs = draft(drafter.softmax(-1), last, seeds, zeros, k)
        context = torch.cat([last.unsqueeze(1), tokens], dim=1)
        emitted = exact(tokens, target.softmax(-1)[context], probs, seeds, zeros)
        counts.append(float((emitted >= 0).sum(dim=1).double().mean()))
    assert 1 < counts[0] < counts[1] <= k + 1


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    """The probability of accepting is the sum of min(p, q) (Leviathan et al., theorem 3.5)."""
    target, drafter = (logits.softmax(-1)[START] for logits in tables())
    seeds, zeros = torch.arange(TRIALS), torch.zeros(TRIALS, dtype=torch.int64)
    last = torch.full((TRIALS,), START)
    tokens, probs = draft(drafter.expand(VOCABULARY, -1), last, seeds, zeros, 1)
    emitted = exact(tokens, target.expand(TRIALS, 2, -1), probs, seeds, zeros)
    overlap = float(torch.minimum(target, drafter).sum())
    assert float((emitted[:, 1] >= 0).double().mean()) == pytest.approx(overlap, abs=0.01)


# Root has three children; the first has two, one of which has one; the second has one.
PARENTS = torch.tensor([-1, -1, -1, 0, 0, 1, 3])


def draft_tree(
    rows: torch.Tensor, last: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, kind: str
) -> tuple[DraftTree, torch.Tensor]:
    """Draft a tree per request from ``rows`` [V, V]; and the drafter's distribution per node."""
    tokens = torch.zeros(len(seeds), len(PARENTS), dtype=torch.int64)
    tree = DraftTree(tokens, PARENTS.expand_as(tokens), torch.full_like(seeds, len(PARENTS)))
    ranks = tree.sibling_ranks()[0].tolist()
    probs = torch.zeros(*tokens.shape, VOCABULARY)
    for node, parent in enumerate(PARENTS.tolist()):
        probs[:, node] = rows[last if parent < 0 else tokens[:, parent]]
        if kind == "most-likely":
            tokens[:, node] = probs[:, node].argsort(dim=-1, descending=True)[:, ranks[node]]
            continue
        weights = claimed_probs(tree, probs, kind)[:, node]
        tokens[:, node] = inverse_cdf(weights, uniforms(seeds, positions, Purpose.DRAFT, node))
    return tree, probs


def claimed_probs(tree: DraftTree, probs: torch.Tensor, kind: str) -> torch.Tensor | None:
    if kind == "most-likely":
        return None
    return distinct_sibling_probs(tree, probs) if kind == "distinct" else probs


def tree_p_value(setting: Setting, kind: str, claimed: str) -> float:
    """Draft trees of ``kind`` and verify them as if they were of the kind ``claimed``."""
    target, drafter = tables()
    target_probs, rows = target_rows(target, setting), drafter.softmax(-1)

    def step(last: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tree, probs = draft_tree(rows, last, seeds, positions, kind)
        context = torch.cat([last.unsqueeze(1), tree.tokens], dim=1)
        given = claimed_probs(tree, probs, claimed)
        streams = {"seeds": seeds, "positions": positions}
        return rejection_sample_tree(tree, target_probs[context], given, **streams).tokens

    return chi_square(streams(step, TRIALS), joint(expected_rows(target, setting)))


@pytest.mark.parametrize("kind", ["independent", "distinct", "most-likely"])
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[6], SETTINGS[17]], ids=str)
def test_trees_have_the_targets_distribution(setting: Setting, kind: str) -> None:
    assert tree_p_value(setting, kind, kind) > PASSES


def test_distinct_siblings_taken_for_independent_ones_are_seen() -> None:
    assert tree_p_value(SETTINGS[0], "distinct", "independent") < FAILS


def test_tokens_taken_for_fixed_ones_stay_exact() -> None:
    """Whatever drafted them: only fewer are accepted than with their probabilities."""
    assert tree_p_value(SETTINGS[0], "independent", "most-likely") > PASSES

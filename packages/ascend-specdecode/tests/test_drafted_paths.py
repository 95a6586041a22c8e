"""Paths through drafted chains and trees, against plain recursion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import Proposal
from ascend_specdecode.drafted_paths import (
    after,
    first_path,
    is_path,
    kept,
    node_depths,
    nodes_by_depth,
    tree_fault,
)

#     5 -> 6 -> 7        and 5 -> 8, 9 -> 6, and 5 again
TREE = Proposal(
    (5, 6, 7, 8, 9, 6, 5), torch.arange(7.0).unsqueeze(1), parents=(-1, 0, 1, 0, -1, 4, -1)
)


def test_a_tree_by_hand() -> None:
    assert first_path(TREE) == 3
    assert nodes_by_depth(TREE) == (3, 3, 1)
    assert node_depths(TREE.parents or ()) == [0, 1, 2, 1, 0, 1, 0]
    assert kept(TREE, (5, 6, 7, 1)) == 3
    assert kept(TREE, (5, 8, 1)) == 1
    assert kept(TREE, (9, 6, 1)) == 0
    assert kept(TREE, (1,)) == 0
    below = after(TREE, 5)
    assert (below.tokens, below.parents) == ((6, 7, 8), (-1, 0, -1))
    assert below.probabilities is not None
    assert below.probabilities.flatten().tolist() == [1, 2, 3]
    assert after(TREE, 9).tokens == (6,)
    assert after(TREE, 3).tokens == after(after(TREE, 9), 6).tokens == ()


def test_a_chain_by_hand() -> None:
    chain = Proposal((5, 6, 7), torch.arange(3.0).unsqueeze(1))
    assert first_path(chain) == 3
    assert nodes_by_depth(chain) == (1, 1, 1)
    assert kept(chain, (5, 6, 9)) == 2
    rest = after(chain, 5)
    assert (rest.tokens, rest.parents) == ((6, 7), None)
    assert rest.probabilities is not None
    assert rest.probabilities.flatten().tolist() == [1, 2]
    assert after(chain, 6).tokens == after(Proposal((5,)), 5).tokens == ()


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    count = draw(st.integers(0, 7))
    tokens = tuple(draw(st.integers(0, 2)) for _ in range(count))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    return Proposal(tokens, parents=draw(st.sampled_from([parents, None])))


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """The tokens of every path from the sequence, the empty one included."""
    parents = proposal.parents
    if parents is None:
        parents = tuple(range(-1, len(proposal.tokens) - 1))
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return [(), *found]


@given(proposals(), st.lists(st.integers(0, 2), max_size=4))
def test_paths_are_those_of_the_parents(proposal: Proposal, tokens: list[int]) -> None:
    known = paths(proposal)
    assert tree_fault(proposal) is None
    assert is_path(proposal, tokens) == (tuple(tokens) in known)
    assert sum(nodes_by_depth(proposal)) == len(proposal.tokens)
    assert len(nodes_by_depth(proposal)) == max(map(len, known))
    for path in known:
        stays = kept(proposal, (*path, 9))
        assert path[:stays] == proposal.tokens[:stays]
        assert stays <= min(len(path), first_path(proposal))
        if proposal.parents is None:
            assert stays == len(path)


@given(proposals(), st.integers(0, 2))
def test_what_is_drafted_after_a_token_are_the_paths_through_its_first_node(
    proposal: Proposal, token: int
) -> None:
    rest = after(proposal, token)
    assert tree_fault(rest) is None
    through = {path[1:] for path in paths(proposal) if path[:1] == (token,)}
    assert set(paths(rest)) <= through | {()}
    if len([path for path in paths(proposal) if path == (token,)]) == 1:
        assert set(paths(rest)) == through


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((-1,), "1 parents for 2 drafted tokens"),
        ((-1, 1), "the parent of drafted token 1 is 1, not one before it"),
        ((-2, 0), "the parent of drafted token 0 is -2, not one before it"),
    ],
)
def test_what_is_no_tree_is_named(parents: tuple[int, ...], message: str) -> None:
    assert tree_fault(Proposal((5, 6), parents=parents)) == message

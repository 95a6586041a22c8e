"""Paths through drafted tokens, chain or tree: which one a row emitted, and what state it leaves.

The target's state of drafted tokens lies in their order. Of an accepted path the part that is first
in that order stays where it is, ``kept`` tokens; what follows is given back by length and computed
again with the next step. In a chain that is the whole path.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_specdecode.protocols import NOTHING, Proposal
from ascend_specdecode.trees import ROOT


def first_path(proposal: Proposal) -> int:
    """Return how many leading tokens each follow the one before: all of a chain."""
    parents = proposal.parents
    if parents is None:
        return len(proposal.tokens)
    length = 0
    while length < len(parents) and parents[length] == length - 1:
        length += 1
    return length


def kept(proposal: Proposal, emitted: Sequence[int]) -> int:
    """Return how many accepted tokens have their state where the sequence has them.

    Args:
        proposal: what was verified.
        emitted: what that emitted: accepted tokens and one more.
    """
    accepted = len(emitted) - 1
    if proposal.parents is None:
        return accepted
    most, count = min(accepted, first_path(proposal)), 0
    while count < most and emitted[count] == proposal.tokens[count]:
        count += 1
    return count


def is_path(proposal: Proposal, tokens: Sequence[int]) -> bool:
    """Whether drafted tokens lead from the sequence along all of ``tokens``."""
    if proposal.parents is None:
        return tuple(tokens) == proposal.tokens[: len(tokens)]
    here = {ROOT}
    for token in tokens:
        pairs = zip(proposal.tokens, proposal.parents, strict=True)
        here = {node for node, (own, above) in enumerate(pairs) if own == token and above in here}
    return bool(here)


def after(proposal: Proposal, token: int) -> Proposal:
    """Return what is drafted after ``token``, which the sequence says next; nothing if it is not.

    Of siblings that are the same token the first counts.
    """
    tokens, parents = proposal.tokens, proposal.parents
    if parents is None:
        nodes = list(range(1, len(tokens))) if tokens[:1] == (token,) else []
    else:
        nodes = _below(parents, _child(proposal, token))
    if not nodes:
        return NOTHING
    index = {node: place for place, node in enumerate(nodes)}
    above = None if parents is None else tuple(index.get(parents[node], -1) for node in nodes)
    probabilities = proposal.probabilities
    return Proposal(
        tuple(tokens[node] for node in nodes),
        None if probabilities is None else probabilities[nodes],
        above,
    )


def nodes_by_depth(proposal: Proposal) -> tuple[int, ...]:
    """Return how many drafted tokens there are at each position after the sequence."""
    if proposal.parents is None:
        return (1,) * len(proposal.tokens)
    depths = node_depths(proposal.parents)
    counts = [0] * (max(depths, default=-1) + 1)
    for depth in depths:
        counts[depth] += 1
    return tuple(counts)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Return how many drafted tokens are above each one."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


def all_paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """Return the tokens of the path to each leaf, the first leaf first."""
    parents = proposal.parents
    if parents is None:
        return [proposal.tokens] if proposal.tokens else []
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    inner = set(parents)
    return [path for node, path in enumerate(paths) if node not in inner]


def tree_fault(proposal: Proposal) -> str | None:
    """Say what is wrong with the parents of a proposal, None where they are a tree."""
    parents = proposal.parents
    if parents is None:
        return None
    if len(parents) != len(proposal.tokens):
        return f"{len(parents)} parents for {len(proposal.tokens)} drafted tokens"
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            return f"the parent of drafted token {node} is {parent}, not one before it"
    return None


def _child(proposal: Proposal, token: int) -> int | None:
    assert proposal.parents is not None  # noqa: S101 - the caller has looked
    for node, (own, above) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        if above == ROOT and own == token:
            return node
    return None


def _below(parents: Sequence[int], top: int | None) -> list[int]:
    """Return the nodes below one, in their order."""
    if top is None:
        return []
    inside = {top}
    found = []
    for node, parent in enumerate(parents):
        if parent in inside:
            inside.add(node)
            found.append(node)
    return found

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import (
    ArgumentError,
    DraftTree,
    InverseCdf,
    Purpose,
    distinct_sibling_probs,
    rejection_sample,
    rejection_sample_tree,
    rejection_sample_tree_with,
    uniforms,
    verify_tree_greedy,
)

VOCABULARY = 4


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    batch, width = draw(st.integers(0, 4)), draw(st.integers(0, 7))
    parents = [[draw(st.integers(-1, node - 1)) for node in range(width)] for _ in range(batch)]
    token = st.integers(0, VOCABULARY - 1)
    tokens = [[draw(token) for _ in range(width)] for _ in range(batch)]
    counts = [draw(st.integers(0, width)) for _ in range(batch)]
    shape = (batch, width)
    return DraftTree(
        torch.tensor(tokens, dtype=torch.int64).reshape(shape),
        torch.tensor(parents, dtype=torch.int64).reshape(shape),
        torch.tensor(counts, dtype=torch.int64),
    )


def lists(tree: DraftTree, row: int) -> tuple[list[int], list[int], int]:
    return tree.tokens[row].tolist(), tree.parents[row].tolist(), int(tree.num_nodes[row])


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node and everything above it, from the root down."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@given(trees())
def test_mask_depths_and_ranks_are_those_of_the_parents(tree: DraftTree) -> None:
    mask, depths, ranks = tree.attention_mask(), tree.depths(), tree.sibling_ranks()
    for row in range(len(tree.tokens)):
        _, parents, _ = lists(tree, row)
        for node, parent in enumerate(parents):
            path = ancestors(parents, node)
            assert mask[row, node].nonzero().flatten().tolist() == sorted(path)
            assert int(depths[row, node]) == len(path) - 1
            assert int(ranks[row, node]) == parents[:node].count(parent)


@given(trees(), st.integers(0, 2**31))
def test_greedy_takes_the_longest_path_of_the_targets_choices(tree: DraftTree, seed: int) -> None:
    batch, width = tree.tokens.shape
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(VOCABULARY, (batch, width + 1), generator=generator)
    found = verify_tree_greedy(tree, choices)
    for row in range(batch):
        tokens, parents, count = lists(tree, row)
        own = choices[row].tolist()
        right: list[list[int]] = [[]]
        for node in range(count):
            path = ancestors(parents, node)
            before = [own[0], *(own[above + 1] for above in path)]
            if [tokens[above] for above in path] == before[:-1]:
                right.append(path)
        emitted = [token for token in found.tokens[row].tolist() if token >= 0]
        nodes = [node for node in found.nodes[row].tolist() if node >= 0]
        assert nodes in right
        assert len(nodes) == max(map(len, right))
        assert emitted == [*(tokens[node] for node in nodes), own[nodes[-1] + 1 if nodes else 0]]


def test_one_tree_by_hand() -> None:
    #        context -> 5 -> 7      and   context -> 6 -> 8 -> 9
    tree = DraftTree(
        torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[-1, -1, 0, 1, 3]]), torch.tensor([5])
    )
    found = verify_tree_greedy(tree, torch.tensor([[6, 1, 8, 1, 9, 2]]))
    assert found.tokens.tolist() == [[6, 8, 9, 2, -1, -1]]
    assert found.nodes.tolist() == [[1, 3, 4, -1, -1]]
    found = verify_tree_greedy(tree, torch.tensor([[5, 8, 1, 1, 1, 1]]))
    assert found.tokens.tolist() == [[5, 8, -1, -1, -1, -1]]


def random_probs(tree: DraftTree, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, width = tree.tokens.shape
    logits = 2 * torch.randn(2, batch, width + 1, VOCABULARY, generator=generator)
    return logits[0].softmax(-1), logits[1, :, :width].softmax(-1)


def one_by_one(
    tree: DraftTree, row: int, target: torch.Tensor, drafter: torch.Tensor | None
) -> tuple[list[int], list[int]]:
    """Multi-round rejection of one tree, node after node, in float64; seed and position are row."""
    tokens, parents, count = lists(tree, row)

    def number(depth: int, purpose: Purpose, rank: int = 0) -> float:
        return float(uniforms(torch.tensor(row), torch.tensor(row + depth), purpose, rank))

    path: list[int] = []
    current, left = -1, target[0].double()
    while True:
        children = [node for node in range(count) if parents[node] == current]
        for rank, node in enumerate(children):
            q = torch.zeros_like(left)
            if drafter is None:
                q[tokens[node]] = 1
            else:
                q = drafter[node].double()
            if number(len(path), Purpose.ACCEPT, rank) * q[tokens[node]] < left[tokens[node]]:
                path.append(node)
                current, left = node, target[node + 1].double()
                break
            left = (left - q).clamp(min=0)
            left = left / left.sum()
        else:
            limit = number(len(path), Purpose.CHOOSE) * float(left.sum())
            last = int((left.cumsum(0) <= limit).sum())
            return [*(tokens[node] for node in path), last], path


@given(trees(), st.integers(0, 2**31), st.booleans())
def test_sampling_equals_a_plain_loop(tree: DraftTree, seed: int, with_probs: bool) -> None:
    target, drafter = random_probs(tree, seed)
    probs = drafter if with_probs else None
    rows = torch.arange(len(tree.tokens))
    found = rejection_sample_tree(tree, target, probs, seeds=rows, positions=rows)
    assert found.tokens.shape == target.shape[:2]
    for row in range(len(tree.tokens)):
        own = None if probs is None else probs[row]
        tokens, path = one_by_one(tree, row, target[row], own)
        assert [token for token in found.tokens[row].tolist() if token >= 0] == tokens
        assert [node for node in found.nodes[row].tolist() if node >= 0] == path


@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_a_chain_is_rejection_sampling(seed: int, batch: int, width: int, with_probs: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch, width), generator=generator)
    counts = torch.randint(width + 1, (batch,), generator=generator)
    tree = DraftTree.chain(tokens, counts)
    target, drafter = random_probs(tree, seed)
    probs = drafter if with_probs else None
    streams = {"seeds": torch.arange(batch), "positions": 3 * torch.arange(batch)}
    found = rejection_sample_tree(tree, target, probs, **streams)
    expected = rejection_sample(tokens, target, probs, num_draft_tokens=counts, **streams)
    assert torch.equal(found.tokens, expected)
    accepted = (expected >= 0).sum(dim=1) - 1
    step = torch.arange(width)
    assert torch.equal(found.nodes, torch.where(step < accepted.unsqueeze(1), step, -1))


def test_a_second_child_gets_the_residual_of_the_first() -> None:
    """p = (.5, .5): child 0 rejected leaves only token 1, so child 1 is certain."""
    tree = DraftTree(torch.tensor([[0, 1]]), torch.tensor([[-1, -1]]), torch.tensor([2]))
    found = rejection_sample_tree_with(
        tree,
        torch.full((1, 3, 2), 0.5),
        None,
        torch.tensor([[0.6, 0.999]]),
        InverseCdf(torch.zeros(1, 3).double()),
    )
    assert found.nodes.tolist() == [[1, -1]]
    assert found.tokens.tolist() == [[1, 0, -1]]


def test_distinct_siblings_exclude_those_before() -> None:
    tree = DraftTree(
        torch.tensor([[2, 0, 2, 1]]), torch.tensor([[-1, -1, 0, -1]]), torch.tensor([4])
    )
    row = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = distinct_sibling_probs(tree, row.expand(1, 4, 4))[0]
    torch.testing.assert_close(found[0], row)
    torch.testing.assert_close(found[1], torch.tensor([0.1, 0.2, 0.0, 0.4]) / 0.7)
    torch.testing.assert_close(found[2], row)  # another parent
    torch.testing.assert_close(found[3], torch.tensor([0.0, 0.2, 0.0, 0.4]) / 0.6)


def test_reads_no_value_on_a_device() -> None:
    with torch.device("meta"):
        index = torch.zeros(2, 3, dtype=torch.int64)
        tree = DraftTree(index, index, index[:, 0])
        assert verify_tree_greedy(tree, torch.zeros(2, 4, dtype=torch.int64)).nodes.shape == (2, 3)
        target, drafter = torch.zeros(2, 4, 5), torch.zeros(2, 3, 5)
        streams = {"seeds": index[:, 0], "positions": index[:, 0]}
        found = rejection_sample_tree(tree, target, drafter, **streams)
        assert found.tokens.shape == (2, 4)
        assert distinct_sibling_probs(tree, drafter).shape == (2, 3, 5)


GOOD: dict[str, Any] = {
    "tokens": torch.tensor([[0, 1, 2]]),
    "parents": torch.tensor([[-1, 0, -1]]),
    "num_nodes": torch.tensor([3]),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.zeros(3).long(), r"tokens: found shape \[3\], allowed shape \[B, N\]"),
        ("tokens", torch.zeros(1, 3), "tokens.dtype: found torch.float32"),
        ("tokens", torch.tensor([[0, -1, 2]]), r"tokens\[0, 1\]: found -1"),
        ("parents", torch.zeros(1, 2).long(), r"parents: found shape \[1, 2\]"),
        ("parents", torch.tensor([[-1, 1, 0]]), r"parents\[0, 1\]: found 1, .*comes before"),
        ("parents", torch.tensor([[-1, -2, 0]]), r"parents\[0, 1\]: found -2"),
        ("num_nodes", torch.tensor([4]), r"num_nodes\[0\]: found 4, allowed 0..N \(N = 3\)"),
        ("num_nodes", torch.tensor([3], device="meta"), "num_nodes.device: found meta"),
    ],
)
def test_bad_trees_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    DraftTree(**GOOD)
    with pytest.raises(ArgumentError, match=message):
        DraftTree(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        (torch.full((1, 3, 4), 0.25), None, r"target_probs: .* = \[1, 4, 4\]"),
        (torch.full((1, 4, 2), 0.5), None, r"tokens\[0, 2\]: found 2, .*V = 2"),
        (torch.full((1, 4, 4), 0.3), None, r"target_probs\[0, 0\]: found a sum of 1.2"),
        (torch.full((1, 4, 4), 0.25), torch.full((1, 3, 5), 0.2), "draft_probs: found shape"),
        (torch.full((1, 4, 4), 0.25), torch.zeros(1, 3, 4), r"draft_probs\[0, 0\]: .*sum of 0"),
        (torch.full((1, 4, 4), 0.25).half(), None, "target_probs.dtype: .*float16"),
    ],
)
def test_bad_probabilities_are_refused(
    target: torch.Tensor, drafter: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        rejection_sample_tree(DraftTree(**GOOD), target, drafter)

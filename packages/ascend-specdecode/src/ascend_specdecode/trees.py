"""Tree drafts: several continuations verified in one call, exactly.

A node is accepted only below an accepted parent, so what is emitted is one path from the root.

Sampled trees use multi-round rejection (Miao et al. 2024, SpecInfer, algorithm 2; Sun et al. 2023,
SpecTr): the children of an accepted node are tried in order. Child x, sampled from q, is accepted
with probability min(1, r(x) / q(x)), where r is first the target's distribution and becomes
max(r - q, 0), normalised, after each child that is rejected. When none is accepted, the next token
is sampled from the last r. That is exact for any number of children, if q is the distribution that
the child was really sampled from, given the siblings before it: the same q for independent ones,
see :func:`distinct_sibling_probs` for distinct ones, a point mass for a child that was not sampled.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_specdecode.choices import Choice, InverseCdf
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.random_streams import Purpose, uniforms
from ascend_specdecode.rejection import request_streams, residual
from ascend_specdecode.tensors import (
    check_distributions,
    check_indices,
    check_probabilities,
    check_range,
    check_same_dtype,
    check_shape,
    refuse_first,
)
from ascend_specdecode.verification import emit

ROOT: Final = -1
"""Parent of the nodes that directly follow the context."""


@attrs.frozen(eq=False)
class DraftTree:
    """Drafted tokens of a batch as trees; a parent comes before its children.

    Attributes:
        tokens: [B, N] int64 (or int32), the token of each node. Siblings are in the order in which
            they were drawn.
        parents: [B, N] int64 (or int32), the index of each node's parent, below its own; -1 for
            nodes that directly follow the context.
        num_nodes: [B] int64 (or int32), nodes of each row, 0..N; what follows them is ignored.

    Raises:
        ArgumentError: shapes, dtypes or devices disagree. For CPU tensors also: a count outside
            0..N, a negative token, a parent that does not come before its child.
    """

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor

    def __attrs_post_init__(self) -> None:
        if self.tokens.dim() != 2:
            raise ArgumentError("tokens", f"shape {list(self.tokens.shape)}", "shape [B, N]")
        batch, width = self.tokens.shape
        check_shape("parents", self.parents, [batch, width], "[B, N]")
        check_shape("num_nodes", self.num_nodes, [batch], "[B]")
        named = {"tokens": self.tokens, "parents": self.parents, "num_nodes": self.num_nodes}
        check_indices(named, self.tokens.device, "tokens")
        if self.tokens.device.type == "cpu":
            self._check_values(width)

    def _check_values(self, width: int) -> None:
        check_range("num_nodes", self.num_nodes, f"0..N (N = {width})", most=width)
        check_range("tokens", self.tokens, "token ids >= 0", used=self.present)
        wrong = (self.parents < ROOT) | (self.parents >= torch.arange(width))
        allowed = "-1, or the index of a node that comes before"
        refuse_first("parents", self.parents, wrong & self.present, allowed)

    @classmethod
    def chain(cls, draft_tokens: Tensor, num_draft_tokens: Tensor) -> DraftTree:
        """Return linear drafts as trees: [B, K] tokens, [B] counts.

        Raises:
            ArgumentError: as the class.
        """
        steps = torch.arange(draft_tokens.shape[-1], device=draft_tokens.device) - 1
        return cls(draft_tokens, steps.expand_as(draft_tokens), num_draft_tokens)

    @property
    def present(self) -> Tensor:
        """Which nodes count: [B, N] bool."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return index < self.num_nodes.unsqueeze(1)

    def sibling_ranks(self) -> Tensor:
        """How many siblings come before each node: [B, N] int64."""
        siblings = self.parents.unsqueeze(1) == self.parents.unsqueeze(2)
        return torch.tril(siblings.long(), diagonal=-1).sum(dim=-1)

    def depths(self) -> Tensor:
        """How many ancestors each node has: [B, N] int64."""
        return self.attention_mask().sum(dim=-1) - 1

    def attention_mask(self) -> Tensor:
        """Which nodes each node may see: itself and its ancestors, [B, N, N] bool."""
        batch, width = self.tokens.shape
        mask = torch.zeros(batch, width, width, dtype=torch.bool, device=self.tokens.device)
        rows = torch.arange(batch, device=self.tokens.device)
        for node in range(width):
            parent = self.parents[:, node].clamp(ROOT, node - 1)
            above = mask[rows, parent.clamp(min=0)] & (parent > ROOT).unsqueeze(1)
            mask[:, node] = above
            mask[:, node, node] = True
        return mask


@attrs.frozen(eq=False)
class TreeVerification:
    """The accepted path of each tree.

    Attributes:
        tokens: [B, N+1] int64, the emitted tokens (at least one: accepted nodes, then a recovered
            or bonus token), then -1.
        nodes: [B, N] int64, indices of the accepted nodes from the root down, then -1: the target
            keeps the state of these and gives back that of all others.
    """

    tokens: Tensor
    nodes: Tensor


def verify_tree_greedy(tree: DraftTree, target_argmax: Tensor) -> TreeVerification:
    """Accept the longest path that the target would have chosen itself.

    Args:
        tree: the drafted trees.
        target_argmax: [B, N+1] int64 (or int32); entry 0 is the target's choice after the context,
            entry n+1 the one after node n.

    Returns:
        The path; its tokens are the target's own greedy stream.

    Raises:
        ArgumentError: shape, dtype or device disagree with the tree.
    """
    batch, width = tree.tokens.shape
    check_shape("target_argmax", target_argmax, [batch, width + 1], "[B, N+1]")
    check_indices({"target_argmax": target_argmax}, tree.tokens.device, "tokens")
    above = tree.parents.long().clamp(min=ROOT) + 1
    agrees = (tree.tokens == target_argmax.gather(1, above)) & tree.present
    # A node is right if it and all nodes above it agree.
    ancestry = tree.attention_mask()
    right = (agrees.unsqueeze(1) | ~ancestry).all(dim=2) & tree.present
    length = torch.where(right, ancestry.sum(dim=2), 0)
    padded = torch.nn.functional.pad(length, (1, 0))  # the root, for rows without a right node
    deepest = padded.argmax(dim=1, keepdim=True)
    path = torch.nn.functional.pad(ancestry, (0, 0, 1, 0))[torch.arange(batch), deepest.squeeze(1)]
    index = torch.where(path, torch.arange(width, device=path.device), width).sort(dim=1).values
    nodes = torch.where(index < width, index, ROOT)
    tokens = tree.tokens.gather(1, nodes.clamp(min=0))
    last = target_argmax.gather(1, deepest).squeeze(1).long()
    return TreeVerification(emit(tokens, padded.gather(1, deepest).squeeze(1), last), nodes)


@torch.no_grad()
def rejection_sample_tree(
    tree: DraftTree,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> TreeVerification:
    """Accept one path so that what is emitted has the target's distribution (see the module).

    For chains this is :func:`~ascend_specdecode.rejection_sample`, with the same random numbers.

    Args:
        tree: the drafted trees.
        target_probs: [B, N+1, V] float32 (or float64); entry 0 follows the context, entry n+1
            follows node n.
        draft_probs: [B, N, V] of the same dtype, the distribution that each node was sampled from
            given the siblings before it; None where nodes were not sampled.
        seeds: [B] int64, one per request; None draws them from torch's default generator.
        positions: [B] int64, tokens in each sequence before this step (>= 0); None is 0.

    Returns:
        The path and the tokens.

    Raises:
        ArgumentError: shapes, dtypes or devices disagree. For CPU tensors also: a token outside
            0..V-1, a negative position, a row that does not sum to 1 or has a negative probability.
    """
    _check_tree_step(tree, target_probs, draft_probs)
    seeds, positions = request_streams(tree.tokens, seeds, positions)
    accept, choose = tree_numbers(tree, seeds, positions)
    return rejection_sample_tree_with(tree, target_probs, draft_probs, accept, choose)


def tree_numbers(tree: DraftTree, seeds: Tensor, positions: Tensor) -> tuple[Tensor, InverseCdf]:
    """Return the random numbers of :func:`rejection_sample_tree`.

    Args:
        tree: the drafted trees.
        seeds: [B] int64.
        positions: [B] int64.

    Returns:
        [B, N] that accept, and what chooses the token after the path.
    """
    rows, starts = seeds.unsqueeze(1), positions.unsqueeze(1)
    ends = starts + torch.arange(tree.tokens.shape[1] + 1, device=tree.tokens.device)
    at, ranks = starts + tree.depths(), tree.sibling_ranks()
    accept = uniforms(rows, at, Purpose.ACCEPT, ranks)
    return accept, InverseCdf(uniforms(rows, ends, Purpose.CHOOSE))


@torch.no_grad()
def rejection_sample_tree_with(
    tree: DraftTree,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    choose: Choice,
) -> TreeVerification:
    """Do what :func:`rejection_sample_tree` does with random numbers that are given.

    Args:
        tree: the drafted trees.
        target_probs: [B, N+1, V] float.
        draft_probs: [B, N, V] float, or None.
        accept_uniforms: [B, N] float in [0, 1).
        choose: chooses the token after the path.

    Returns:
        The path and the tokens.
    """
    path = _Path.start(tree)
    rounds = _Rounds(tree, target_probs, draft_probs, accept_uniforms, target_probs[:, 0].clone())
    for node in range(tree.tokens.shape[1]):
        path.follow(node, rounds.accepts(node, path.tried(node)))
    everyone = slice(0, len(path.length))
    return path.verification(choose(rounds.left, path.length, everyone))


@torch.no_grad()
def distinct_sibling_probs(tree: DraftTree, parent_probs: Tensor) -> Tensor:
    """Return what distinct siblings were sampled from, for :func:`rejection_sample_tree`.

    A sibling that must differ from those before it is sampled from the parent's distribution
    without their tokens.

    Args:
        tree: the drafted trees.
        parent_probs: [B, N, V] float, the drafter's distribution after the parent of each node.

    Returns:
        [B, N, V]; a node whose siblings have taken all tokens has a row of zeros.

    Raises:
        ArgumentError: the shape disagrees with the tree.
    """
    batch, width = tree.tokens.shape
    vocabulary = parent_probs.shape[-1]
    check_shape("parent_probs", parent_probs, [batch, width, vocabulary], "[B, N, V]")
    tokens = tree.tokens.long().clamp(0, vocabulary - 1)
    siblings = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)).to(parent_probs.dtype)
    found = torch.empty_like(parent_probs)
    for node in range(width):
        taken = torch.zeros_like(parent_probs[:, 0])
        taken.scatter_add_(1, tokens[:, :node], siblings[:, node, :node])
        left = parent_probs[:, node].masked_fill(taken > 0, 0)
        found[:, node] = left / left.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return found


@attrs.define(eq=False)
class _Path:
    """Where verification stands in each tree.

    Attributes:
        tree: the trees.
        current: [B] int64, the last accepted node; -1 at the root.
        length: [B] int64, accepted nodes.
        nodes: [B, N] int64, their indices, then -1.
    """

    tree: DraftTree
    current: Tensor
    length: Tensor
    nodes: Tensor

    @classmethod
    def start(cls, tree: DraftTree) -> _Path:
        nodes = torch.full_like(tree.tokens, ROOT, dtype=torch.int64)
        at_root = torch.full_like(tree.num_nodes, ROOT, dtype=torch.int64)
        return cls(tree, at_root, at_root + 1, nodes)

    def tried(self, node: int) -> Tensor:
        """Which rows have this node below their last accepted one: [B] bool."""
        return (self.tree.parents[:, node] == self.current) & (node < self.tree.num_nodes)

    def follow(self, node: int, accepted: Tensor) -> None:
        """Move to ``node`` in the rows [B] that accept it."""
        here = torch.arange(self.nodes.shape[1], device=accepted.device) == self.length[:, None]
        self.nodes = torch.where(here & accepted.unsqueeze(1), node, self.nodes)
        self.current = torch.where(accepted, node, self.current)
        self.length = self.length + accepted

    def verification(self, last: Tensor) -> TreeVerification:
        """Return the tokens of the path and ``last`` [B] after them."""
        tokens = self.tree.tokens.gather(1, self.nodes.clamp(min=0))
        return TreeVerification(emit(tokens, self.length, last), self.nodes)


@attrs.frozen(eq=False)
class _Rounds:
    """The rounds of multi-round rejection; ``left`` [B, V] is r of the module's text."""

    tree: DraftTree
    target_probs: Tensor
    draft_probs: Tensor | None
    accept_uniforms: Tensor
    left: Tensor

    def accepts(self, node: int, tried: Tensor) -> Tensor:
        """Try ``node`` in the rows ``tried`` [B]; return which accept it, and update ``left``."""
        rows = self._touched(tried)
        left, tried_here = self.left[rows], tried[rows]
        token = self.tree.tokens[rows, node].long().clamp(0, left.shape[1] - 1).unsqueeze(1)
        drafted_with = self._draft_row(rows, node, token)
        offered = drafted_with.gather(1, token).squeeze(1)
        chance = torch.where(offered > 0, left.gather(1, token).squeeze(1) / offered, 0)
        accepts = tried_here & (self.accept_uniforms[rows, node] < chance)
        rest = residual(left, drafted_with, out=drafted_with)
        rest = rest / rest.sum(dim=-1, keepdim=True)
        after = torch.where(accepts.unsqueeze(1), self.target_probs[rows, node + 1], rest)
        self.left[rows] = torch.where(tried_here.unsqueeze(1), after, left)
        return torch.zeros_like(tried).index_copy(0, rows, accepts)

    def _touched(self, tried: Tensor) -> Tensor:
        """Rows to compute: on a CPU only the tried ones; elsewhere finding them would wait."""
        if tried.device.type == "cpu":
            return tried.nonzero().squeeze(1)
        return torch.arange(len(tried), device=tried.device)

    def _draft_row(self, rows: Tensor, node: int, token: Tensor) -> Tensor:
        if self.draft_probs is not None:
            return self.draft_probs[rows, node]
        empty = self.left.new_zeros(len(rows), self.left.shape[1])
        return empty.scatter_(1, token, 1.0)


def _check_tree_step(tree: DraftTree, target_probs: Tensor, draft_probs: Tensor | None) -> None:
    device = tree.tokens.device
    batch, width = tree.tokens.shape
    vocabulary = target_probs.shape[-1] if target_probs.dim() else 0
    check_shape("target_probs", target_probs, [batch, width + 1, vocabulary], "[B, N+1, V]")
    named = {"target_probs": target_probs}
    if draft_probs is not None:
        check_shape("draft_probs", draft_probs, [batch, width, vocabulary], "[B, N, V]")
        named["draft_probs"] = draft_probs
    check_probabilities(named, device, "tokens")
    if draft_probs is not None:
        check_same_dtype("draft_probs", draft_probs, "target_probs", target_probs)
    if device.type != "cpu":
        return
    allowed = f"token ids 0..V-1 (V = {vocabulary})"
    check_range("tokens", tree.tokens, allowed, most=vocabulary - 1, used=tree.present)
    scored = torch.nn.functional.pad(tree.present, (1, 0), value=True)
    check_distributions("target_probs", target_probs, scored)
    if draft_probs is not None:
        check_distributions("draft_probs", draft_probs, tree.present)

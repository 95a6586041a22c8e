"""Ranks as threads of one process: the same collectives, for tests and for finding faults.

A real process group hangs when one rank leaves out a collective. These raise instead, naming the
rank, so a test finds out in no time.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..errors import AttentionBackendError, InvalidFieldError

T = TypeVar("T")


class RankMismatchError(AttentionBackendError, RuntimeError):
    """Ranks of one process do not agree on their collectives.

    Attributes:
        rank: The rank that noticed.
    """

    def __init__(self, rank: int, found: str, allowed: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}: found {found}; allowed: {allowed}")


Members = tuple[int, ...]


class _Board:
    """Where ranks leave what they send; a collective is done when all its ranks have posted."""

    def __init__(self, timeout: float) -> None:
        self._condition = threading.Condition()
        self._timeout = timeout
        self._posts: dict[tuple[Members, int], dict[int, tuple[str, list[torch.Tensor]]]] = {}
        self._taken: Counter[tuple[Members, int]] = Counter()
        self._gone: set[int] = set()
        self._calls: dict[tuple[Members, int], list[str]] = {}

    def calls(self, members: Members, rank: int) -> list[str]:
        """The collectives that a rank has called in the group of these members."""
        with self._condition:
            return self._calls.setdefault((members, rank), [])

    def leave(self, rank: int) -> None:
        """A rank will post no more."""
        with self._condition:
            self._gone.add(rank)
            self._condition.notify_all()

    def swap(
        self, key: tuple[Members, int], rank: int, kind: str, sent: list[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """What every member sent in this collective, in the order of members."""
        members = key[0]
        with self._condition:
            posts = self._posts.setdefault(key, {})
            posts[rank] = (kind, sent)
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._gone.union(posts).issuperset(members), self._timeout
            )
            self._taken[key] += 1
            if self._taken[key] == len(members):
                del self._posts[key]
        missing = [member for member in members if member not in posts]
        if missing:
            raise RankMismatchError(rank, f"{kind} without ranks {missing}", "every rank calls it")
        for member in members:
            _check_agreement(rank, member, posts[rank], posts[member])
        return [posts[member][1] for member in members]


def _check_agreement(
    rank: int,
    other: int,
    own: tuple[str, list[torch.Tensor]],
    found: tuple[str, list[torch.Tensor]],
) -> None:
    described = [
        f"{kind} of {[(list(tensor.shape), str(tensor.dtype)) for tensor in sent]}"
        for kind, sent in (own, found)
    ]
    if described[0] != described[1]:
        raise RankMismatchError(rank, f"{described[1]} on rank {other}", described[0])


class ThreadDCPGroup:
    """A :class:`DCPGroup` of threads; :func:`run_ranks` makes them.

    Attributes:
        rank: This rank in the group.
        size: Number of ranks.
        calls: Collectives that this rank has called in this group, in order.
    """

    def __init__(self, board: _Board, thread: int, members: Members) -> None:
        self._board, self._thread, self._members = board, thread, members
        self.rank, self.size = members.index(thread), len(members)
        self.calls = board.calls(members, thread)

    def subgroup(self, ranks: Sequence[int]) -> ThreadDCPGroup:
        """The group of some ranks of this one, this rank among them, in the given order.

        Raises:
            InvalidFieldError: This rank is not among them.
        """
        if self.rank not in ranks:
            raise InvalidFieldError("ranks", list(ranks), f"ranks with {self.rank} among them")
        return ThreadDCPGroup(
            self._board, self._thread, tuple(self._members[rank] for rank in ranks)
        )

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, in the order of ranks; all have one shape."""
        return [sent[0].clone() for sent in self._swap("all_gather", [tensor])]

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the i-th tensor to rank i; returns what every rank sent to this one.

        Raises:
            InvalidFieldError: Not one tensor per rank.
        """
        if len(tensors) != self.size:
            raise InvalidFieldError("tensors", len(tensors), f"{self.size}, one per rank")
        return [sent[self.rank].clone() for sent in self._swap("all_to_all", tensors)]

    def _swap(self, kind: str, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        self.calls.append(kind)
        sent = [tensor.clone() for tensor in tensors]  # as they are now, like a real transfer
        return self._board.swap((self._members, len(self.calls)), self._thread, kind, sent)


def run_ranks(size: int, body: Callable[[ThreadDCPGroup], T], *, timeout: float = 60.0) -> list[T]:
    """Run ``body`` once per rank, each rank in a thread of its own.

    Args:
        size: Number of ranks.
        body: What a rank does; it is given the group of all ranks. Context variables, such as the
            profile of the operators, are those of the caller.
        timeout: Seconds that a collective waits for the other ranks.

    Returns:
        What each rank returned.

    Raises:
        RankMismatchError: A rank left out a collective, or called another one than the others.
        Exception: What the first failing rank raised.
    """
    board = _Board(timeout)
    members = tuple(range(size))

    def run(rank: int) -> T:
        try:
            return body(ThreadDCPGroup(board, rank, members))
        finally:
            board.leave(rank)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(contextvars.copy_context().run, run, rank) for rank in members]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # A rank that fails makes the others miss it: its own error says more than theirs.
    errors.sort(key=lambda error: isinstance(error, RankMismatchError))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]

"""Ranks as threads: they compute what processes would, and say what processes would hang on."""

from __future__ import annotations

import threading

import pytest
import torch

from ascend_attn_backends import (
    InvalidFieldError,
    RankMismatchError,
    SingleRankGroup,
    ThreadDCPGroup,
    run_ranks,
)
from ascend_attn_ops import use_profile
from ascend_attn_ops.context import current_profile
from ascend_hwprofile import profile_for


def test_collectives() -> None:
    def body(group: ThreadDCPGroup) -> tuple[list[int], list[int], list[str]]:
        own = torch.tensor([group.rank])
        gathered = torch.cat(group.all_gather(own)).tolist()
        sent = [own * 10 + other for other in range(group.size)]
        return gathered, torch.cat(group.all_to_all(sent)).tolist(), group.calls

    found = run_ranks(3, body)
    assert [gathered for gathered, _, _ in found] == [[0, 1, 2]] * 3
    assert [arrived for _, arrived, _ in found] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert {tuple(calls) for _, _, calls in found} == {("all_gather", "all_to_all")}


def test_a_group_of_one_needs_no_threads() -> None:
    group, rows = SingleRankGroup(), torch.ones(2)
    assert group.all_gather(rows) == group.all_to_all([rows]) == [rows]


def test_subgroups_have_collectives_of_their_own() -> None:
    def body(world: ThreadDCPGroup) -> list[int]:
        pair = world.subgroup([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
        again = world.subgroup([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
        own = torch.tensor([world.rank])
        found = torch.cat(pair.all_gather(own)).tolist()
        found += torch.cat(again.all_gather(own + 10)).tolist()
        return found + torch.cat(world.all_gather(own)).tolist()

    assert run_ranks(4, body) == [[0, 1, 10, 11, 0, 1, 2, 3]] * 2 + [[2, 3, 12, 13, 0, 1, 2, 3]] * 2


def test_what_is_sent_is_what_it_was() -> None:
    """Neither side sees what the other writes later."""

    def body(group: ThreadDCPGroup) -> list[int]:
        own = torch.tensor([group.rank])
        arrived = group.all_gather(own)
        own += 7
        for tensor in arrived:
            tensor += 100
        return torch.cat(arrived).tolist()

    assert run_ranks(2, body) == [[100, 101]] * 2


def test_context_variables_are_those_of_the_caller() -> None:
    with use_profile(profile_for("A3")):
        found = run_ranks(2, lambda group: current_profile())
    assert found == [profile_for("A3")] * 2


@pytest.mark.timeout(120)
def test_a_collective_that_a_rank_leaves_out_is_named() -> None:
    """At once, not when the time-out is over."""

    def body(group: ThreadDCPGroup) -> None:
        if group.rank:
            group.all_gather(torch.zeros(1))

    with pytest.raises(RankMismatchError, match=r"found all_gather without ranks \[0\]"):
        run_ranks(3, body, timeout=600)


@pytest.mark.parametrize("kind", ["collective", "shape"])
def test_ranks_that_call_different_collectives_are_named(kind: str) -> None:
    def body(group: ThreadDCPGroup) -> None:
        rows = torch.zeros(2 + group.rank if kind == "shape" else 2)
        if kind == "collective" and group.rank:
            group.all_to_all([rows, rows])
        else:
            group.all_gather(rows)

    found = (
        "all_to_all of " if kind == "collective" else r"all_gather of \[\(\[3\], 'torch.float32'"
    )
    with pytest.raises(RankMismatchError, match=f"rank 0: found {found}"):
        run_ranks(2, body)


def test_the_error_of_a_rank_says_more_than_those_of_the_others() -> None:
    def body(group: ThreadDCPGroup) -> None:
        if group.rank == 2:
            raise KeyError("of rank 2")
        group.all_gather(torch.zeros(1))

    with pytest.raises(KeyError, match="of rank 2"):
        run_ranks(3, body)


def test_waiting_is_bounded() -> None:
    release = threading.Event()

    def body(group: ThreadDCPGroup) -> None:
        if group.rank:
            release.wait(10)
        else:
            try:
                group.all_gather(torch.zeros(1))
            finally:
                release.set()

    with pytest.raises(RankMismatchError, match=r"without ranks \[1\]"):
        run_ranks(2, body, timeout=0.05)


def test_impossible_groups_and_messages_are_named() -> None:
    def body(group: ThreadDCPGroup) -> None:
        with pytest.raises(InvalidFieldError, match=r"ranks: found \[\d\]; allowed: ranks with"):
            group.subgroup([1 - group.rank])
        with pytest.raises(InvalidFieldError, match="tensors: found 1; allowed: 2, one per rank"):
            group.all_to_all([torch.zeros(1)])

    run_ranks(2, body)

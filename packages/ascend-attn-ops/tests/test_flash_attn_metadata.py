from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from flash_attn_plan_oracle import Call, decode, least_makespan, rows_of, visible_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale

import ascend_attn_ops as ops
from ascend_hwprofile import profile_for


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Call, dict[str, Any]]:
    requests = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 5]))
    layout = draw(st.sampled_from(["TND", "BSND", "BNSD"]))
    short = draw(st.booleans())
    q_len = st.integers(0, 3) if short else st.integers(0, 150)
    kv_len = st.integers(0, 1500)
    mode = draw(st.sampled_from([0, 3, 4]))
    window = st.one_of(st.just(-1), st.integers(0, 700))
    left, right = (draw(window), draw(window)) if mode == 4 else (-1, -1)
    q_lens = draw(st.lists(q_len, min_size=requests, max_size=requests))
    kv_lens = draw(st.lists(kv_len, min_size=requests, max_size=requests))
    call = Call(q_lens, kv_lens, group, kv_heads, mode, left, right, layout == "BNSD")
    arguments = {
        "num_heads_q": group * kv_heads,
        "num_heads_kv": kv_heads,
        "head_dim": draw(st.sampled_from([64, 128, 256])),
        "seqused_kv": ints(kv_lens),
        "max_seqlen_q": draw(st.sampled_from([max(q_lens), -1])),
        "max_seqlen_kv": draw(st.sampled_from([max(kv_lens), -1])),
        "mask_mode": mode,
        "win_left": left,
        "win_right": right,
        "layout_q": layout,
        "layout_kv": "PA_BBND",
        "layout_out": layout,
    }
    if layout == "TND":
        ends = [sum(q_lens[:i]) for i in range(requests + 1)]
        arguments["cu_seqlens_q"] = ints(ends)
    else:
        arguments["seqused_q"] = ints(q_lens)
    return call, arguments


def core_costs(fa: list[list[int]], blocks: dict[tuple[int, int, int], int]) -> list[int]:
    return [
        sum(cost for block, cost in blocks.items() if tuple(r[:3]) <= block < tuple(r[3:6]))
        for r in fa
    ]


@settings(max_examples=scale(200))
@given(calls())
def test_plan_covers_every_block_once_and_accounts_for_every_split_row(
    case: tuple[Call, dict[str, Any]],
) -> None:
    call, arguments = case
    words = ops.flash_attn_metadata(**arguments)
    plan = decode(words)
    sections, is_split, height, width, cube, vector, layout = plan.head[:7]
    assert (cube, vector, layout) == (36, 72, 0)
    assert not any(plan.head[7:])
    assert not plan.rest.any()
    assert sections == len(plan.fa)
    blocks = visible_blocks(call, height, width)
    heads = len(call.q_lens) * call.kv_heads
    records = [record for section in plan.fa for record in section]
    assert records[0][:3] == [0, 0, 0]
    assert records[-1][3:6] == [heads, 0, 0]
    for before, after in pairwise(records):  # no gap, no overlap
        assert before[3:6] == after[:3]
    assert sum(core_costs(records, blocks)) == sum(blocks.values())
    assert is_split == any(plan.fd)
    for fa, fd in zip(plan.fa, plan.fd, strict=True):
        assert 1 <= len(fa) <= cube
        assert len(fd) <= vector
        _check_merges(call, fa, fd, blocks, height)


def _check_merges(call: Call, fa: list, fd: list, blocks: dict, height: int) -> None:
    owners: dict[tuple[int, int], list[int]] = {}
    for bn, m, s2 in blocks:
        for core, record in enumerate(fa):
            if tuple(record[:3]) <= (bn, m, s2) < tuple(record[3:6]):
                cores = owners.setdefault((bn, m), [])
                if core not in cores:
                    cores.append(core)
    shared = {row: cores for row, cores in owners.items() if len(cores) > 1}
    rows_merged: Counter[tuple[int, int]] = Counter()
    partial_of: dict[tuple[int, tuple[int, int]], int] = {}
    index = 0
    for row, cores in sorted(shared.items()):
        for core in cores:
            partial_of[core, row] = index
            index += 1
    for bn, m, first, count, start, rows in fd_fields(fd):
        cores = shared[bn, m]
        assert count == len(cores)
        assert first == partial_of[cores[0], (bn, m)]
        assert rows > 0
        assert start == rows_merged[bn, m]  # shares follow each other without gap
        rows_merged[bn, m] += rows
    assert rows_merged == {row: rows_of(call, *row, height) for row in shared}
    for core, record in enumerate(fa):
        mine = [index for (owner, _), index in partial_of.items() if owner == core]
        if mine:
            assert record[6] == min(mine)


def fd_fields(fd: list[list[int]]) -> list[list[int]]:
    assert not any(any(record[6:]) for record in fd)
    return [record[:6] for record in fd]


@settings(max_examples=scale(100))
@given(calls())
def test_slowest_core_is_as_fast_as_contiguous_runs_allow(
    case: tuple[Call, dict[str, Any]],
) -> None:
    call, arguments = case
    plan = decode(ops.flash_attn_metadata(**arguments))
    blocks = visible_blocks(call, *plan.head[2:4])
    if plan.head[0] > 1 or not blocks:
        return
    units = list(blocks.values())
    if not plan.head[1]:  # whole rows
        rows: Counter[tuple[int, int]] = Counter()
        for (bn, m, _), cost in blocks.items():
            rows[bn, m] += cost
        units = list(rows.values())
    assert max(core_costs(plan.fa[0], blocks)) == least_makespan(units, 36)


def decode_step(kv_lens: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "head_dim": 128,
        "cu_seqlens_q": torch.arange(len(kv_lens) + 1, dtype=torch.int32),
        "seqused_kv": ints(kv_lens),
        "max_seqlen_q": 1,
        "max_seqlen_kv": max(kv_lens),
        "mask_mode": 3,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
        "layout_out": "TND",
    } | changes


def _call_of(arguments: dict[str, Any]) -> Call:
    kv = arguments["seqused_kv"].tolist()
    q = arguments["cu_seqlens_q"].diff().tolist()
    group = arguments["num_heads_q"] // arguments["num_heads_kv"]
    return Call(q, kv, group, arguments["num_heads_kv"], arguments["mask_mode"], -1, -1, False)


@pytest.mark.parametrize(
    ("kv_lens", "is_split"),
    [
        ([60000], 1),
        ([100000, 30, 7], 1),
        ([8192] * 16, 1),
        ([8192] * 9, 0),
        ([1 + 311 * (i % 17) for i in range(64)], 0),
    ],
    ids=["one_long", "one_long_two_short", "3.6_rows_per_core", "2_rows_per_core", "mixed"],
)
def test_long_decode_is_within_five_percent_of_an_even_share(
    kv_lens: list[int], is_split: int
) -> None:
    arguments = decode_step(kv_lens)
    plan = decode(ops.flash_attn_metadata(**arguments))
    blocks = visible_blocks(_call_of(arguments), *plan.head[2:4])
    lower_bound = max(sum(blocks.values()) / 36, max(blocks.values()))
    slowest = max(core_costs(plan.fa[0], blocks))
    assert slowest <= 1.05 * lower_bound
    assert plan.head[1] == is_split


def test_sections_follow_the_cache_budget() -> None:
    lengths = [30000] * 3  # 2 heads of 30000 * 1024 bytes of Q, O, K, V: three fit in 96 MiB
    arguments = decode_step(lengths, num_heads_q=2, num_heads_kv=2, mask_mode=0)
    arguments |= {"cu_seqlens_q": ints([0, 30000, 60000, 90000]), "max_seqlen_q": 30000}
    plan = decode(ops.flash_attn_metadata(**arguments))
    heads_per_section = 96 * 2**20 // (30000 * 1024)
    assert heads_per_section == 3
    assert [section[-1][3:6] for section in plan.fa] == [[3, 0, 0], [6, 0, 0]]
    assert plan.head[0] == 2
    one = decode(ops.flash_attn_metadata(**arguments | {"max_seqlen_kv": -1}))
    assert one.fa == plan.fa


def test_all_empty_is_one_core_that_spans_everything() -> None:
    plan = decode(ops.flash_attn_metadata(**decode_step([0, 0])))
    assert plan.fa == [[[0, 0, 0, 16, 0, 0] + [0] * 10]]
    assert plan.fd == [[]]


def test_same_arguments_same_plan_and_other_lengths_another() -> None:
    first = ops.flash_attn_metadata(**decode_step([9000, 40]))
    assert torch.equal(first, ops.flash_attn_metadata(**decode_step([9000, 40])))
    assert not torch.equal(first, ops.flash_attn_metadata(**decode_step([9000, 4000])))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [64, 256]),
        ({"max_seqlen_q": 65}, [128, 128]),
        ({"max_seqlen_q": -1}, [128, 128]),
        ({"max_seqlen_kv": 128}, [128, 128]),
        ({"max_seqlen_kv": -1}, [64, 256]),
        ({"mask_mode": 0}, [64, 256]),
        ({"mask_mode": 4, "win_left": 128, "win_right": 500}, [128, 128]),
        ({"mask_mode": 4, "win_left": 129, "win_right": 0}, [64, 256]),
        ({"mask_mode": 4}, [64, 256]),
        ({"head_dim": 256, "max_seqlen_q": 15}, [64, 256]),
        ({"head_dim": 256, "max_seqlen_q": 16}, [128, 128]),
    ],
)
def test_block_sizes_follow_the_longest_lengths(changes: dict[str, Any], sizes: list[int]) -> None:
    words = ops.flash_attn_metadata(**decode_step([1000, 100]) | changes)
    assert words[2:4].tolist() == sizes


def test_core_counts_come_from_the_profile_of_the_call_or_the_context() -> None:
    other = profile_for("Ascend950DT_9572")
    assert (other.cube_cores, other.vector_cores) == (28, 56)
    default = ops.flash_attn_metadata(**decode_step([5000] * 40))
    assert default[4:6].tolist() == [36, 72]
    called = ops.flash_attn_metadata(**decode_step([5000] * 40), profile=other)
    with ops.use_profile(other):
        inside = ops.flash_attn_metadata(**decode_step([5000] * 40))
    assert torch.equal(called, inside)
    assert called[4:6].tolist() == [28, 56]
    assert called.numel() == -(-(16 + 16 * 84 * 320) // 4096) * 4096
    assert default.numel() == -(-(16 + 16 * 108 * 320) // 4096) * 4096


def test_a_profile_without_core_counts_is_refused_by_name() -> None:
    unknown = attrs.evolve(profile_for("A5"), cube_cores=None)
    with pytest.raises(ValueError, match="Ascend950PR_9599 without core counts"):
        ops.flash_attn_metadata(**decode_step([5]), profile=unknown)


@pytest.mark.parametrize(
    ("requests_times_heads", "words"), [(1, 4096), (2, 4096), (8, 16384), (16, 28672)]
)
def test_size_matches_the_vendors_figures(requests_times_heads: int, words: int) -> None:
    arguments = decode_step([64] * requests_times_heads, num_heads_q=1, num_heads_kv=1)
    assert ops.flash_attn_metadata(**arguments).numel() == words


def test_the_operator_exists_on_a5_only() -> None:
    arguments = ops.flash_attn_metadata.bind(**decode_step([64]))
    assert ops.check("flash_attn_metadata", arguments, profile_for("A5")) == []
    for family in ("A2", "A3"):
        refusals = ops.check("flash_attn_metadata", arguments, profile_for(family))
        assert [refusal.rule for refusal in refusals] == ["product"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seqused_kv": ints([5, -1])}, r"seqused_kv\[1\] = -1"),
        ({"cu_seqlens_q": ints([0, 2, 1])}, r"cu_seqlens_q\[2\] = 1 after 2"),
        ({"cu_seqlens_q": ints([1, 2, 3])}, r"cu_seqlens_q\[0\] = 1, not 0"),
    ],
)
def test_values_that_the_kernel_rejects_are_named_without_sanitizer(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ops.OpArgumentError, match=text):
        ops.flash_attn_metadata(**decode_step([64, 70]) | changes)


def test_sanitizer_names_a_longest_length_that_is_too_small() -> None:
    arguments = decode_step([64, 70]) | {"max_seqlen_kv": 69}
    ops.flash_attn_metadata(**arguments)
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match="max_seqlen_kv 69, longest 70"):
        ops.flash_attn_metadata(**arguments)


def test_without_any_tensor_the_torch_operator_runs_and_infers_its_size() -> None:
    arguments = {"batch_size": 2, "max_seqlen_q": 64, "max_seqlen_kv": 256, "mask_mode": 0}
    op = torch.ops.ascend_attn.flash_attn_metadata
    assert torch.equal(op(8, 2, 128, **arguments), ops.flash_attn_metadata(8, 2, 128, **arguments))
    with torch._subclasses.FakeTensorMode():
        assert op(8, 2, 128, **arguments).shape == op(8, 2, 128, **arguments).shape == (8192,)


def test_opcheck() -> None:
    arguments = decode_step([64, 700])
    heads = tuple(arguments.pop(name) for name in ("num_heads_q", "num_heads_kv", "head_dim"))
    torch.library.opcheck(torch.ops.ascend_attn.flash_attn_metadata, heads, arguments)


def test_vendor_call_passes_every_setting_by_name() -> None:
    (build,) = ops.flash_attn_metadata.npu_calls.values()
    call = build(ops.flash_attn_metadata.bind(8, 2, 128, batch_size=2, max_seqlen_kv=9))
    assert call.function == "flash_attn_metadata"
    assert call.args == (8, 2, 128)
    assert call.kwargs == {
        "batch_size": 2, "max_seqlen_q": -1, "max_seqlen_kv": 9, "mask_mode": 0,
        "win_left": -1, "win_right": -1,
        "layout_q": "BSND", "layout_kv": "BSND", "layout_out": "BSND",
    }  # fmt: skip

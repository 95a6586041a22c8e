"""The plan of sparse_flash_mla: what each core computes, against keys counted one by one."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale

import ascend_attn_ops as ops
from ascend_hwprofile import profile_for

INT = torch.int32
PROFILES = ["A2", "A3", "A5"]
VENDOR_PARAMETERS = (
    "num_heads_q num_heads_kv head_dim cu_seqlens_q cu_seqlens_ori_kv cu_seqlens_cmp_kv seqused_q "
    "seqused_ori_kv seqused_cmp_kv cmp_residual_kv ori_topk_length cmp_topk_length batch_size "
    "max_seqlen_q max_seqlen_ori_kv max_seqlen_cmp_kv ori_topk cmp_topk cmp_ratio ori_mask_mode "
    "cmp_mask_mode ori_win_left ori_win_right layout_q layout_kv has_ori_kv has_cmp_kv"
)  # ops-transformer docs sparse_flash_mla


@attrs.frozen
class Plan:
    """Lengths and masks of one plan."""

    heads: int
    q_lens: list[int]
    ori_lens: list[int]
    ratio: int
    mask: int
    left: int
    topk: int
    profile: str

    @property
    def compressed(self) -> bool:
        return self.ratio > 1


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    requests = draw(st.integers(1, 6))
    profile = draw(st.sampled_from(PROFILES))
    sizes = st.lists(st.integers(0, 40), min_size=requests, max_size=requests)
    sparse = draw(st.booleans())
    product = profile != "A5"
    ratio = draw(st.sampled_from([1, 4 if sparse else 128] if product else [1, 2, 4, 128]))
    return Plan(
        draw(st.sampled_from([1, 8, 64, 128] if product else [1, 48, 64, 65, 128])),
        draw(sizes),
        [draw(st.integers(0, 3000)) for _ in range(requests)],
        ratio,
        draw(st.sampled_from([4] if product else [0, 3, 4])),
        127 if product else draw(st.sampled_from([-1, 0, 127, 1000])),
        512 if sparse and ratio > 1 else 0,
        profile,
    )


def call(p: Plan, **changes: Any) -> dict[str, Any]:
    ori = torch.tensor(p.ori_lens, dtype=INT)
    ends = [0, *itertools.accumulate(p.q_lens)]
    arguments = {
        "num_heads_q": p.heads, "num_heads_kv": 1, "head_dim": 512,
        "cu_seqlens_q": torch.tensor(ends, dtype=INT),
        "seqused_ori_kv": ori, "max_seqlen_q": max(p.q_lens) or 1,
        "ori_mask_mode": p.mask, "ori_win_left": p.left, "ori_win_right": 0,
        "layout_q": "TND", "layout_kv": "PA_BBND", "has_cmp_kv": p.compressed,
    }  # fmt: skip
    if p.compressed:
        arguments |= {
            "seqused_cmp_kv": ori // p.ratio, "cmp_residual_kv": ori % p.ratio,
            "cmp_ratio": p.ratio, "cmp_mask_mode": 3, "cmp_topk": p.topk,
        }  # fmt: skip
    return arguments | changes


def make(p: Plan, **changes: Any) -> torch.Tensor:
    return ops.sparse_flash_mla_metadata(**call(p, **changes), profile=profile_for(p.profile))


def block_shape(p: Plan) -> tuple[int, int]:
    """Queries and keys of a block."""
    if p.profile == "A5":
        return 1, 128
    return (1 if p.topk else 256 // p.heads), 512


def blocks_of_rows(p: Plan) -> list[tuple[int, int, int, int]]:
    """(request, row, blocks, cost) of every row, by looking at each key and query."""
    queries, width = block_shape(p)
    found = []
    for request, (q_len, ori) in enumerate(zip(p.q_lens, p.ori_lens, strict=True)):
        for row, first in enumerate(range(0, q_len, queries)):
            members = range(first, min(first + queries, q_len))
            positions = [ori - q_len + i for i in members]
            window = sum(any(sees_ori(p, at, j) for at in positions) for j in range(ori))
            after = positions[-1] + 1
            cmp = sum((t + 1) * p.ratio <= after for t in range(ori // p.ratio))
            cmp = min(cmp, p.topk) if p.topk else cmp
            parts = [window, cmp if p.compressed else 0]
            cost = sum(part_cost(n, width, len(members) * p.heads) for n in parts)
            found.append((request, row, sum(-(-n // width) for n in parts), cost))
    return found


def sees_ori(p: Plan, at: int, key: int) -> bool:
    if p.mask == 0:
        return True
    return key <= at and (p.mask == 3 or p.left < 0 or key >= at - p.left)


def part_cost(keys: int, width: int, rows: int) -> int:
    cost = 0
    while keys > 0:
        piece = min(keys, width)
        cost += 6 * ((rows + 15) // 16) + 10 * ((piece + 63) // 64)
        keys -= piece
    return cost


def runs(p: Plan, plan: torch.Tensor) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end (request, row) of each used core; checks the fixed words of the records."""
    records = plan[: 36 * 9].view(36, 9)
    assert not plan[36 * 9 :].any()  # no row is split, so nothing is merged
    pairs = p.profile == "A5" and p.heads > 64
    if pairs:
        assert torch.equal(records[::2], records[1::2])
        records = records[::2]
    used = [record for record in records.tolist() if record[0]]
    assert all(r[0] == 1 and r[3] == r[6] == r[7] == 0 for r in used)
    assert [r[0] for r in records.tolist()] == [1] * len(used) + [0] * (len(records) - len(used))
    return [((r[1], r[2]), (r[4], r[5])) for r in used]


@settings(max_examples=scale(100))
@given(plans())
def test_every_block_belongs_to_one_core_and_no_core_has_too_much(p: Plan) -> None:
    plan = make(p)
    assert plan.shape == (1024,)
    assert plan.dtype == INT
    spans = runs(p, plan)
    rows = blocks_of_rows(p)
    assert spans[0][0] == (0, 0)
    assert spans[-1][1] == (len(p.q_lens), 0)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end == start
        assert end > (0, 0)
    shares = [[r for r in rows if start <= r[:2] < end] for start, end in spans]
    assert sum(len(share) for share in shares) == len(rows)
    costs = [sum(r[3] for r in share) for share in shares]
    dearest = max((r[3] for r in rows), default=0)
    cores = profile_for(p.profile).cube_cores or 0
    cores = cores // 2 if p.profile == "A5" and p.heads > 64 else cores
    assert len(spans) <= cores
    assert max(costs) <= sum(costs) / cores + 2 * dearest
    if p.profile == "A5" and p.heads > 64:
        most = max(sum(r[2] for r in share) for share in shares)
        assert plan[8] == (most if sum(costs) else 0)


def _fixed(**changes: Any) -> Plan:
    values = {
        "heads": 64, "q_lens": [3, 0, 5], "ori_lens": [700, 10, 400], "ratio": 4, "mask": 4,
        "left": 127, "topk": 512, "profile": "A3",
    }  # fmt: skip
    return Plan(**(values | changes))


def test_equal_rows_are_dealt_out_one_to_each_core() -> None:
    spans = runs(_fixed(), make(_fixed()))
    assert len(spans) == 8
    assert spans[2] == ((0, 2), (2, 0))
    assert spans[3] == ((2, 0), (2, 1))


def test_plans_are_deterministic_and_of_their_arguments() -> None:
    plan = make(_fixed())
    assert torch.equal(plan, make(_fixed()))
    many = _fixed(q_lens=[40, 0, 5])
    assert not torch.equal(make(many), make(many, max_seqlen_q=40, has_cmp_kv=False, cmp_ratio=1,
                                            cmp_mask_mode=0, cmp_topk=0))  # fmt: skip
    assert not torch.equal(plan, make(_fixed(ori_lens=[700, 10, 2])))


def test_lengths_of_index_rows_cut_the_cost() -> None:
    p = _fixed(profile="A5", q_lens=[40], ori_lens=[4000])
    full = make(p, cmp_mask_mode=0)
    lengths = torch.cat([torch.zeros(20, 1, dtype=INT), torch.full((20, 1), 512, dtype=INT)])
    cut = make(p, cmp_mask_mode=0, cmp_topk_length=lengths)
    assert torch.equal(full, make(p, cmp_mask_mode=0, cmp_topk_length=lengths * 0 + 512))
    assert runs(p, cut)[0][1] > runs(p, full)[0][1]


def test_batched_queries_take_their_length_from_the_longest() -> None:
    p = _fixed(ratio=1, topk=0, q_lens=[6, 6, 6])
    packed = make(p)
    dense = make(p, cu_seqlens_q=None, layout_q="BSND", batch_size=3)
    assert torch.equal(packed, dense)
    used = torch.tensor([6, 6, 6], dtype=INT)
    without = make(p, cu_seqlens_q=None, layout_q="BSND", seqused_q=used, max_seqlen_q=0)
    assert torch.equal(packed, without)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 3, 2, 8], dtype=INT)}, r"cu_seqlens_q\[2\] = 2"),
        ({"seqused_ori_kv": torch.tensor([5, -1, 5], dtype=INT)}, r"seqused_ori_kv\[1\] = -1"),
        ({"cmp_residual_kv": torch.tensor([0, 4, 0], dtype=INT)}, r"cmp_residual_kv\[1\] = 4"),
        (
            {"cmp_mask_mode": 0, "cmp_topk_length": torch.zeros(7, 1, dtype=INT)},
            "7 values for 8 queries",
        ),
    ],
)
def test_values_that_the_kernel_rejects_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ops.OpArgumentError, match=text):
        make(_fixed(profile="A5"), **changes)


def test_names_and_order_are_the_vendors() -> None:
    signature = inspect.signature(ops.SparseFlashMlaMetadataArguments)
    assert list(signature.parameters) == VENDOR_PARAMETERS.split()
    record = ops.sparse_flash_mla_metadata.bind(**call(_fixed()))
    vendor = ops.sparse_flash_mla_metadata.npu_calls["cann_ops_transformer"](record)
    assert vendor.function == "sparse_flash_mla_metadata"
    assert vendor.args == (64, 1, 512)
    assert set(vendor.kwargs) <= set(VENDOR_PARAMETERS.split()[3:])
    assert {"ori_mask_mode", "cmp_mask_mode", "ori_win_left", "has_cmp_kv"} <= set(vendor.kwargs)


def test_opcheck() -> None:
    arguments = call(_fixed())
    positional = tuple(arguments.pop(n) for n in ("num_heads_q", "num_heads_kv", "head_dim"))
    torch.library.opcheck(
        torch.ops.ascend_attn.sparse_flash_mla_metadata,
        positional,
        arguments,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )

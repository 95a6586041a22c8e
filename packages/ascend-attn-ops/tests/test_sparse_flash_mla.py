"""sparse_flash_mla against a float64 definition by loops over requests, rows and keys."""

from __future__ import annotations

import inspect
import itertools
import math
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
SIZE = 16
SCALE = 0.3
VENDOR_PARAMETERS = (
    "q ori_kv cmp_kv ori_sparse_indices cmp_sparse_indices ori_block_table cmp_block_table "
    "cu_seqlens_q cu_seqlens_ori_kv cu_seqlens_cmp_kv seqused_q seqused_ori_kv seqused_cmp_kv "
    "cmp_residual_kv ori_topk_length cmp_topk_length sinks metadata softmax_scale cmp_ratio "
    "ori_mask_mode cmp_mask_mode ori_win_left ori_win_right layout_q layout_kv topk_value_mode "
    "return_softmax_lse"
)  # ops-transformer docs sparse_flash_mla


@attrs.frozen
class Problem:
    """What is drawn for one call."""

    q_lens: list[int]
    ori_lens: list[int]
    heads: int
    layout_q: str
    layout_kv: str
    block: int
    ratio: int
    entries: int  # K, 0 without indices
    ori_mask: int
    cmp_mask: int
    window: tuple[int, int]
    sinks: bool
    seed: int

    @property
    def compressed(self) -> bool:
        return self.ratio > 0

    def cmp_len(self, request: int) -> int:
        return self.ori_lens[request] // self.ratio

    def parts(self, dtype: torch.dtype) -> dict[str, list[Any]]:
        """Per-request tensors."""
        rng = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng).to(dtype)

        requests = range(len(self.q_lens))
        parts = {
            "q": [normal(n, self.heads, SIZE) for n in self.q_lens],
            "ori": [normal(n, SIZE) for n in self.ori_lens],
            "sinks": [normal(self.heads).float()] if self.sinks else [None],
        }
        if self.compressed:
            parts["cmp"] = [normal(self.cmp_len(b), SIZE) for b in requests]
            parts["entries"] = [
                torch.randint(
                    -1, self.cmp_len(b) + 1, (self.q_lens[b], self.entries), generator=rng
                )
                for b in requests
            ]
        return parts


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    requests = draw(st.integers(1, 3))
    layout_q = draw(st.sampled_from(["TND", "BSND"]))
    ratio = draw(st.sampled_from([0, 1, 2, 4, 7]))
    lens = st.lists(st.integers(0, 5), min_size=requests, max_size=requests)
    return Problem(
        draw(lens),
        [draw(st.integers(0, 30)) for _ in range(requests)],
        draw(st.sampled_from([1, 2, 5])),
        layout_q,
        draw(st.sampled_from([layout_q, "PA_BBND"])),
        draw(st.sampled_from([1, 3, 16])),
        ratio,
        draw(st.sampled_from([0, 1, 6])) if ratio else 0,
        draw(st.sampled_from([0, 3, 4, 4])),
        draw(st.sampled_from([0, 3, 3])) if ratio else 0,
        draw(st.sampled_from([(-1, -1), (0, 0), (4, 0), (2, 3), (-1, 1)])),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


def queries(p: Problem, parts: list[torch.Tensor], fill: float = 7.0) -> torch.Tensor:
    """Rows in the query layout; BSND pads, TND gets two rows of padding behind the requests."""
    tail = parts[0].shape[1:]
    pad = torch.full((2, *tail), fill).to(parts[0].dtype)
    if p.layout_q == "TND":
        return torch.cat([*parts, pad])
    room = max(p.q_lens) + 1
    rows = [torch.cat([t, pad[:1].expand(room - len(t), *tail)]) for t in parts]
    return torch.stack(rows)


def keys(p: Problem, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys in the key layout, and the block table."""
    dtype = parts[0].dtype
    if p.layout_kv == "TND":
        return torch.cat([*parts, torch.full((1, SIZE), 9.0).to(dtype)])[:, None], None
    if p.layout_kv == "BSND":
        store = torch.full((len(parts), max(map(len, parts)) + 1, 1, SIZE), 9.0).to(dtype)
        for request, part in enumerate(parts):
            store[request, : len(part), 0] = part
        return store, None
    columns = max(-(-len(part) // p.block) for part in parts) or 1
    ids = torch.randperm(columns * len(parts), generator=torch.Generator().manual_seed(p.seed))
    table = ids.view(len(parts), columns).to(INT)
    apart = torch.full((len(ids), 2, p.block, 1, SIZE), 9.0).to(dtype)
    store = apart[:, 1]
    for request, part in enumerate(parts):
        for position, row in enumerate(part):
            block = int(table[request, position // p.block])
            store[block, position % p.block, 0] = row
        table[request, -(-len(part) // p.block) :] = -5
    return store, table


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT)


def call(p: Problem, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    parts = p.parts(dtype)
    arguments: dict[str, Any] = {
        "q": queries(p, parts["q"]), "sinks": parts["sinks"][0], "softmax_scale": SCALE,
        "ori_mask_mode": p.ori_mask, "cmp_mask_mode": p.cmp_mask,
        "ori_win_left": p.window[0], "ori_win_right": p.window[1],
        "layout_q": p.layout_q, "layout_kv": p.layout_kv, "return_softmax_lse": True,
    }  # fmt: skip
    arguments["ori_kv"], arguments["ori_block_table"] = keys(p, parts["ori"])
    lengths = {"ori": p.ori_lens}
    if p.compressed:
        arguments["cmp_kv"], arguments["cmp_block_table"] = keys(p, parts["cmp"])
        arguments["cmp_ratio"] = p.ratio
        arguments["cmp_residual_kv"] = torch.tensor([n % p.ratio for n in p.ori_lens], dtype=INT)
        lengths["cmp"] = [p.cmp_len(b) for b in range(len(p.q_lens))]
        if p.entries:
            chosen = [part[:, None].to(INT) for part in parts["entries"]]
            arguments["cmp_sparse_indices"] = queries(p, chosen, -1)
    if p.layout_q == "TND":
        arguments["cu_seqlens_q"] = ends(p.q_lens)
    else:
        arguments["seqused_q"] = torch.tensor(p.q_lens, dtype=INT)
    for side, values in lengths.items():
        if p.layout_kv == "TND":
            arguments[f"cu_seqlens_{side}_kv"] = ends(values)
        else:
            arguments[f"seqused_{side}_kv"] = torch.tensor(values, dtype=INT)
    return arguments | changes


def definition(p: Problem, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, ...]]:
    """Per request out [Lq, N, D] and lse [Lq, N] in float64."""
    parts = p.parts(dtype)
    results = []
    for b, query in enumerate(parts["q"]):
        out = torch.zeros(query.shape, dtype=torch.float64)
        lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
        for i in range(len(query)):
            seen = [parts["ori"][b][j] for j in range(p.ori_lens[b]) if sees(p, b, i, j)]
            seen += [parts["cmp"][b][t] for t in chosen(p, parts, b, i)]
            if not seen:
                continue
            keys_of_row = torch.stack(seen).double()
            powers = (SCALE * torch.einsum("nd,kd->nk", query[i].double(), keys_of_row)).exp()
            lse[i] = powers.sum(1).log()
            sink = parts["sinks"][0].double().exp() if p.sinks else 0.0
            out[i] = torch.einsum("nk,kd->nd", powers, keys_of_row) / (
                powers.sum(1) + sink
            ).unsqueeze(1)
        results.append((out, lse))
    return results


def sees(p: Problem, b: int, i: int, j: int) -> bool:
    here = i + p.ori_lens[b] - p.q_lens[b]
    if p.ori_mask == 0:
        return True
    if p.ori_mask == 3:
        return j <= here
    left, right = p.window
    return (left < 0 or j >= here - left) and (right < 0 or j <= here + right)


def chosen(p: Problem, parts: dict[str, list[Any]], b: int, i: int) -> list[int]:
    """Compressed keys of a row: the source tokens of key t end before token (t + 1) * ratio."""
    if not p.compressed:
        return []
    now = i + p.ori_lens[b] - p.q_lens[b]
    legal = [t for t in range(p.cmp_len(b)) if p.cmp_mask == 0 or (t + 1) * p.ratio - 1 <= now]
    if not p.entries:
        return legal
    return [t for t in parts["entries"][b][i].tolist() if t in legal]


def rows_of(p: Problem, out: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rows of each request, and the padding rows."""
    if p.layout_q == "TND":
        total = sum(p.q_lens)
        return list(out[:total].split(p.q_lens)), out[total:]
    pads = [out[b, n:] for b, n in enumerate(p.q_lens)]
    return [out[b, :n] for b, n in enumerate(p.q_lens)], torch.cat(pads)


@settings(max_examples=scale(150))
@given(problems())
def test_the_reference_equals_the_float64_definition(p: Problem) -> None:
    out, lse = ops.sparse_flash_mla(**call(p))
    assert lse.shape == (*out.shape[:-3], 1, *out.shape[-3:-1])
    rows, padding = rows_of(p, out)
    lses, lse_padding = rows_of(p, lse.squeeze(-3))
    for row, row_lse, want in zip(rows, lses, definition(p), strict=True):
        torch.testing.assert_close(row.double(), want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row_lse.double(), want[1], rtol=1e-5, atol=1e-5)
    assert not padding.any()
    assert lse_padding.isneginf().all()


@settings(max_examples=scale(60))
@given(problems(), st.sampled_from([torch.float16, torch.bfloat16, torch.float64]))
def test_other_dtypes_are_within_their_tolerance(p: Problem, dtype: torch.dtype) -> None:
    out, _ = ops.sparse_flash_mla(**call(p, dtype))
    assert out.dtype == dtype
    known = ops.sparse_flash_mla.tolerances
    tolerance = known.get(dtype, ops.Tolerance(1e-12, 1e-12))
    for row, want in zip(rows_of(p, out)[0], definition(p, dtype), strict=True):
        far = (row.double() - want[0]).abs() > tolerance.atol + tolerance.rtol * want[0].abs()
        assert int(far.sum()) <= tolerance.outliers * far.numel()


def _fixed(**changes: Any) -> Problem:
    values: dict[str, Any] = {
        "q_lens": [3, 1], "ori_lens": [29, 14], "heads": 4, "layout_q": "TND",
        "layout_kv": "PA_BBND", "block": 16, "ratio": 4, "entries": 5, "ori_mask": 4,
        "cmp_mask": 3, "window": (6, 0), "sinks": True, "seed": 5,
    }  # fmt: skip
    return Problem(**(values | changes))


def _legal_entries(p: Problem) -> dict[str, Any]:
    rows = torch.full((sum(p.q_lens) + 2, 1, p.entries), -1, dtype=INT)
    rows[:, 0, :2] = torch.tensor([2, 0])
    return call(p, cmp_sparse_indices=rows)


@pytest.mark.parametrize(
    "wrong", [{"window": (7, 0)}, {"cmp_mask": 0}, {"entries": 0}, {"sinks": False}, {"seed": 6}],
    ids=str,
)  # fmt: skip
def test_a_wrong_definition_is_noticed(wrong: dict[str, Any]) -> None:
    p = _fixed(q_lens=[6, 1], entries=0 if "cmp_mask" in wrong else 5)
    out, _ = ops.sparse_flash_mla(**call(p))
    want = torch.cat([rows for rows, _ in definition(attrs.evolve(p, **wrong))])
    assert not torch.allclose(out[:7].double(), want, rtol=1e-3, atol=1e-3)


def test_the_residual_moves_the_mask() -> None:
    p = _fixed(ori_lens=[28, 12], entries=0)
    arguments = call(p)
    out, _ = ops.sparse_flash_mla(**arguments)
    arguments["cmp_residual_kv"] = torch.tensor([3, 3], dtype=INT)
    moved, _ = ops.sparse_flash_mla(**arguments)
    assert not torch.equal(out[0], moved[0])
    assert torch.equal(out[2], moved[2])


def test_all_keys_equal_torch_scaled_dot_product_attention() -> None:
    p = _fixed(q_lens=[5], ori_lens=[12], ratio=3, entries=0, ori_mask=3, sinks=False)
    parts = p.parts(torch.float32)
    every = torch.cat([parts["ori"][0], parts["cmp"][0]])[None]
    now = torch.arange(7, 12)[:, None]
    seen = torch.cat([torch.arange(12) <= now, torch.arange(4) < (now + 1) // 3], 1)
    want = torch.nn.functional.scaled_dot_product_attention(
        parts["q"][0].transpose(0, 1), every, every, seen, scale=SCALE
    ).transpose(0, 1)
    out, _ = ops.sparse_flash_mla(**call(p))
    torch.testing.assert_close(out[:5], want, rtol=1e-5, atol=1e-5)


def test_context_parallel_ranks_compute_their_rows() -> None:
    """A rank gets the keys up to its last token; together they give the whole (vendor example)."""
    p = _fixed(q_lens=[18], ori_lens=[18], entries=0)
    whole, _ = ops.sparse_flash_mla(**call(p))
    head = call(p) | {
        "q": call(p)["q"][:8],
        "cu_seqlens_q": ends([8]),
        "seqused_ori_kv": torch.tensor([8], dtype=INT),
        "seqused_cmp_kv": torch.tensor([2], dtype=INT),
        "cmp_residual_kv": torch.tensor([0], dtype=INT),
    }
    tail = call(p) | {"q": call(p)["q"][8:18], "cu_seqlens_q": ends([10])}
    parts = [ops.sparse_flash_mla(**arguments)[0] for arguments in (head, tail)]
    torch.testing.assert_close(torch.cat(parts), whole[:18], rtol=1e-6, atol=1e-6)


def test_parts_without_sinks_merge_to_the_whole() -> None:
    p = _fixed(sinks=False, ratio=2, q_lens=[3], ori_lens=[29])
    arguments = call(p)
    halves = [
        arguments["cmp_sparse_indices"].clone().index_fill_(-1, torch.tensor(drop), -1)
        for drop in ([0, 1], [2, 3, 4])
    ]
    none = {"seqused_ori_kv": torch.tensor([0], dtype=INT)}
    results = [
        ops.sparse_flash_mla(**(arguments | {"cmp_sparse_indices": halves[0]})),
        ops.sparse_flash_mla(**(arguments | {"cmp_sparse_indices": halves[1]} | none)),
    ]
    parts = [ops.PartialAttention(out, lse[0]) for out, lse in results]
    merged = ops.merge_partials(parts)
    out, lse = ops.sparse_flash_mla(**arguments)
    torch.testing.assert_close(merged.out, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged.lse, lse[0], rtol=1e-5, atol=1e-6)


def test_a_nan_in_a_visible_key_reaches_the_output() -> None:
    arguments = _legal_entries(_fixed())
    arguments["cmp_kv"] = torch.full_like(arguments["cmp_kv"], math.nan)
    out, _ = ops.sparse_flash_mla(**arguments)
    assert out[:4].isnan().all()


def test_lengths_of_index_rows_end_the_reading() -> None:
    p = _fixed(cmp_mask=0, q_lens=[2, 1])
    arguments = call(p, cmp_sparse_indices=torch.tensor([0, 1, 2, 0, 1], dtype=INT).expand(5, 1, 5))
    lengths = torch.tensor([[2], [0], [3], [0], [0]], dtype=INT)
    cut, _ = ops.sparse_flash_mla(**arguments, cmp_topk_length=lengths)
    entries = arguments["cmp_sparse_indices"].masked_fill(torch.arange(5) >= lengths[..., None], -1)
    same, _ = ops.sparse_flash_mla(**(arguments | {"cmp_sparse_indices": entries}))
    full, _ = ops.sparse_flash_mla(**arguments)
    torch.testing.assert_close(cut, same)
    assert not torch.allclose(cut[0], full[0])


def test_the_logarithm_is_a_scalar_unless_asked_for() -> None:
    _, lse = ops.sparse_flash_mla(**call(_fixed(), return_softmax_lse=False))
    assert lse.shape == ()


def with_plan(arguments: dict[str, Any]) -> dict[str, Any]:
    record = ops.sparse_flash_mla.bind(**arguments)
    fields = attrs.asdict(record.plan_arguments(), recurse=False)
    return arguments | {"metadata": ops.sparse_flash_mla_metadata(**fields)}


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        ("cu_seqlens_q", (1,), 5, r"cu_seqlens_q\[2\] = 4 after 5"),
        ("cu_seqlens_q", (2,), 9, r"cu_seqlens_q\[2\] = 9, but there are 6 rows"),
        ("seqused_ori_kv", (1,), 99, r"seqused_ori_kv\[1\] = 99, room for 32"),
        ("seqused_cmp_kv", (0,), -1, r"seqused_cmp_kv\[0\] = -1"),
        ("cmp_residual_kv", (1,), 4, r"cmp_residual_kv\[1\] = 4"),
        ("ori_block_table", (0, 1), 77, r"block_table\[0, 1\] = 77"),
        ("cmp_block_table", (1, 0), -1, r"cmp_block_table: found block_table\[1, 0\] = -1"),
        ("cmp_sparse_indices", (3, 0, 1), 3, r"row 3, entry 1 = 3 of 3 visible keys"),
        ("metadata", (5,), 3, r"word 5 is 3, this call's plan has"),
    ],
)
def test_sanitizer_names_the_first_bad_element(
    name: str, place: tuple[int, ...], value: int, text: str
) -> None:
    arguments = with_plan(_legal_entries(_fixed()))
    with ops.sanitize():
        ops.sparse_flash_mla(**arguments)
    arguments[name] = arguments[name].clone()
    arguments[name][place] = value
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.sparse_flash_mla(**arguments)


def test_sanitizer_notices_a_plan_with_compressed_keys_for_a_call_without() -> None:
    """The documents' warning: has_cmp_kv True, and no cmp_kv in the call."""
    p = _fixed(ratio=0, entries=0, cmp_mask=0, q_lens=[40], ori_lens=[400], layout_kv="TND")
    arguments = call(p)
    plan = attrs.asdict(ops.sparse_flash_mla.bind(**arguments).plan_arguments(), recurse=False)
    compressed = {"has_cmp_kv": True, "cu_seqlens_cmp_kv": ends([300])}
    wrong = ops.sparse_flash_mla_metadata(**(plan | compressed))
    right = ops.sparse_flash_mla_metadata(**plan)
    record = {**arguments, "metadata": wrong}
    assert ops.check("sparse_flash_mla", ops.sparse_flash_mla.bind(**record)) == []
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match="this call's plan"):
        ops.sparse_flash_mla(**record)
    with ops.sanitize():
        ops.sparse_flash_mla(**{**arguments, "metadata": right})


def test_a_product_needs_sinks_and_plan_that_the_host_does_without() -> None:
    record = ops.sparse_flash_mla.bind(**call(_fixed(sinks=False), torch.bfloat16))
    found = ops.check("sparse_flash_mla", record, profile_for("A5"))
    assert {refusal.rule.split(".")[1] for refusal in found} == {"sinks_given", "metadata_given"}
    assert ops.check("sparse_flash_mla", record, profile_for("A5"), provider="reference") == []


def test_names_and_order_are_the_vendors() -> None:
    signature = inspect.signature(ops.SparseFlashMlaArguments)
    assert list(signature.parameters) == VENDOR_PARAMETERS.split()
    record = ops.sparse_flash_mla.bind(**call(_fixed()))
    vendor = ops.sparse_flash_mla.npu_calls["cann_ops_transformer"](record)
    assert (vendor.function, vendor.args) == ("sparse_flash_mla", (record.q,))
    assert set(vendor.kwargs) <= set(VENDOR_PARAMETERS.split()[1:])
    settled = {"ori_mask_mode", "cmp_mask_mode", "ori_win_left", "ori_win_right", "layout_kv"}
    assert settled <= set(vendor.kwargs)
    assert None not in [value for value in vendor.kwargs.values() if not torch.is_tensor(value)]


@pytest.mark.parametrize("wanted", [True, False])
def test_opcheck(wanted: bool) -> None:
    arguments = call(_fixed(), return_softmax_lse=wanted)
    query = arguments.pop("q")
    torch.library.opcheck(
        torch.ops.ascend_attn.sparse_flash_mla,
        (query,),
        arguments,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )


def test_compiles_whole_and_gives_the_same() -> None:
    arguments = call(_fixed())
    query = arguments.pop("q")

    def twice(query: torch.Tensor) -> torch.Tensor:
        out, lse = torch.ops.ascend_attn.sparse_flash_mla(query, **arguments)
        return out * 2 + lse[0, ..., None].exp()

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), twice(query))

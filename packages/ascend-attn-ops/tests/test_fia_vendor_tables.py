"""Every row of the vendor's tiling tables gets the vendor's verdict through ``check``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from fia_vendor_rows import FOLDER, ROWS_IN_TABLE, TABLES, VendorRow, vendor_rows

import ascend_attn_ops as ops
from ascend_hwprofile import profile_for

DATA = Path(__file__).parent / "data" / "fia_vendor_contradictions.toml"
CONTRADICTIONS: list[dict[str, Any]] = tomllib.loads(DATA.read_text("utf-8"))["rows"]
BY_ROW = {(entry["table"], entry["case"]): entry for entry in CONTRADICTIONS}
ROWS = vendor_rows()
CASES = [(row, profile) for row in ROWS for profile in row.profiles]

# what the table's annotation says -> a rule that must be among the refusals
ANNOTATED = {
    "tErr_KvDtypeMismatch": "kv_dtype",
    "tErr_RopeOnlyKeyRope": "rope_pair",
    "tErr_SystemPrefixOnlyKey": "prefix_pair",
    "tErr_SystemPrefixWithPA": "prefix_use",
    "tErr_LearnableSinkWrongShape": "sink_shape",
    "tErr_LearnableSinkWrongDtype": "sink_dtype",
    "tErr_BlockTableShapeZero": "block_table",
    "tErr_LayoutBSND_NBSD_NoRope": "layout_without_rope",
    "tErr_HeadDimBSH_BNSD_Not64_128": "converting_head_size",
    "tErr_MLAGSizeNotDivisible": "heads",
    "tErr_OutDtypeMismatch_BF16": "outputs",
    "tErr_SoftmaxLseShapeWrong": "outputs",
    "tErr_PseShiftDtypeWrong": "pse_dtype",
    "tErr_PseShiftDimWrong": "pse_shape",
    "tErr_PANoActualSeqLenKv": "kv_lengths_given",
    "tMask_GetInfo_Tree_Dim4": "tree_mask",
    "tMask_GetInfo_WrongDim": "mask_rank",
    "tTL_err_BSH_key_H_mismatch": "tensor_list_shapes",
    "tTL_err_BSH_BNSD_layout": "tensor_list",
    "tTL_err_B_gt_limit": "batch_limit",
    "tErr_PA_kv_blocknum_mismatch": "kv_shape",
    "tNoRope_bsh_vhddim_err": "head_alignment",
    "tNoRope_tnd_vhddim_err": "head_size",
    "tNoRope_pa_nz_hdim_err": "nz_head_size",
    "tSysPrefix_bsh_h_err": "prefix_shape",
    "tSysPrefix_aspl_gt_ks_bsh": "prefix_length",
    "tDimNum_bnsd_q_dim_err": "query_rank",
    "cov11_pa_bt_3d_910b": "block_table",
    "cov14_910b_pa_nz_d0": "nz_inner",
    "FusedInferAttentionScore_950_tiling_0": "sink_layout",
    "FusedInferAttentionScore_950_tiling_14": "scale_dtype",
    "FusedInferAttentionScoreTiling_qkvout_check3": "mla_layout",
    "FusedInferAttentionScoreTiling_qkvout_check4": "inner_precise",
    "FusedInferAttentionScoreTiling_qkvout_check5": "kv_shape",
}


def judged(row: VendorRow) -> dict[str, Any]:
    entry = BY_ROW.get((row.table, row.name))
    if entry is None:
        return row.data
    assert entry["judge"] == "inputs"
    return {name: value for name, value in row.data.items() if name != "out"}


@pytest.mark.parametrize("table", TABLES)
def test_the_table_is_whole(table: str) -> None:
    if not (FOLDER / table).is_file():
        pytest.skip(f"{table} is not in {FOLDER}; set ASCEND_VENDOR_TABLES to the vendor tables")
    assert sum(row.table == table for row in ROWS) == ROWS_IN_TABLE[table]


@pytest.mark.parametrize(
    ("row", "profile"), CASES, ids=[f"{profile}-{row.name}" for row, profile in CASES]
)
def test_row_gets_the_vendors_verdict(row: VendorRow, profile: str) -> None:
    refusals = ops.check(row.op, judged(row), profile_for(profile))
    assert (refusals == []) == row.accept, [str(refusal) for refusal in refusals]
    found = {refusal.rule.rpartition(".")[2] for refusal in refusals}
    assert ANNOTATED.get(row.name) in {None, *found}


@pytest.mark.skipif(not ROWS, reason=f"no vendor tables in {FOLDER} (ASCEND_VENDOR_TABLES)")
def test_contradictions_are_rows_that_really_differ() -> None:
    """The list holds nothing that the plain judgement gets right; its rows are printed."""
    rows = {(row.table, row.name): row for row in ROWS}
    for key, entry in BY_ROW.items():
        print(f"{entry['table']} {entry['case']}: {entry['reason']}")
        row = rows[key]
        whole = ops.check(row.op, row.data, profile_for(row.profiles[0]))
        assert (whole == []) != row.accept
    assert {row.name for row in ROWS} >= ANNOTATED.keys()

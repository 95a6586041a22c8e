"""Rows of the vendor's tiling tables of fused_infer_attention_score as argument sets."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import attrs

FOLDER = Path(
    os.environ.get(
        "ASCEND_VENDOR_TABLES",
        Path(__file__).parents[4] / "shared" / "specs" / "vendor_tables",
    )
)
TABLES = {"fia_arch22_tiling.csv": ("A2", "A3"), "fia_arch35_tiling.first23rows.csv": ("A5",)}
ROWS_IN_TABLE = {"fia_arch22_tiling.csv": 190, "fia_arch35_tiling.first23rows.csv": 23}
DTYPES = {
    "FLOAT16": "float16", "BF16": "bfloat16", "FLOAT": "float32", "FLOAT32": "float32",
    "INT8": "int8", "INT32": "int32", "INT64": "int64", "UINT64": "uint64",
    "FLOAT8_E4M3FN": "float8_e4m3fn",
    "INT4": "int32",  # torch has no int4: eight values travel in one int32
}  # fmt: skip
LISTS = ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len")
TENSORS = (
    "query", "key", "value", "pse_shift", "atten_mask", "dequant_scale1", "quant_scale1",
    "dequant_scale2", "quant_scale2", "quant_offset2", "antiquant_scale", "antiquant_offset",
    "block_table", "query_padding_size", "kv_padding_size", "key_antiquant_scale",
    "key_antiquant_offset", "value_antiquant_scale", "value_antiquant_offset",
    "key_shared_prefix", "value_shared_prefix", "query_rope", "key_rope",
    "key_rope_antiquant_scale", "dequant_scale_query", "learnable_sink",
)  # fmt: skip
INTEGERS = (
    "num_heads", "pre_tokens", "next_tokens", "num_key_value_heads", "sparse_mode",
    "inner_precise", "block_size", "antiquant_mode", "key_antiquant_mode", "value_antiquant_mode",
)  # fmt: skip
V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads", "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse", "quant_scale2": "quant_scale_out",
    "quant_offset2": "quant_offset_out", "key_antiquant_scale": "dequant_scale_key",
    "key_antiquant_offset": "dequant_offset_key", "value_antiquant_scale": "dequant_scale_value",
    "value_antiquant_offset": "dequant_offset_value",
    "key_rope_antiquant_scale": "dequant_scale_key_rope", "key_antiquant_mode": "key_quant_mode",
    "value_antiquant_mode": "value_quant_mode",
}  # fmt: skip
NOT_IN_V2 = {
    "dequant_scale1", "quant_scale1", "dequant_scale2", "antiquant_scale", "antiquant_offset",
    "query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix",
    "actual_shared_prefix_len", "antiquant_mode",
}  # fmt: skip
NOT_IN_V1 = {"dequant_scale_query", "learnable_sink"}


@attrs.frozen
class VendorRow:
    """One row: the case as our operator takes it.

    Attributes:
        table: File name.
        name: ``case_name``.
        op: Operator version that can express it.
        data: Arguments for ``check``.
        accept: Whether the vendor's tiling passes.
        profiles: Products that the table is for.
        lost: Arguments that the chosen version has no parameter for.
    """

    table: str
    name: str
    op: str
    data: dict[str, Any]
    accept: bool
    profiles: tuple[str, ...]
    lost: tuple[str, ...]


def vendor_rows() -> list[VendorRow]:
    """All rows of the tables that are here."""
    return [
        _row(table, cells)
        for table in TABLES
        if (FOLDER / table).is_file()
        for cells in csv.DictReader((FOLDER / table).open(encoding="utf-8-sig"))
    ]


def _row(table: str, cells: dict[str, str]) -> VendorRow:
    if "arch35" in table:  # this table keeps the values of its lists in the shape cells
        cells |= {f"{name}_data": cells[f"{name}_shape"] for name in LISTS}
    data = _arguments(cells)
    second = bool(NOT_IN_V1 & data.keys())
    second |= data.get("sparse_mode") == 9 and not NOT_IN_V2 & data.keys()
    lost = sorted((NOT_IN_V2 if second else NOT_IN_V1) & data.keys())
    data = {name: value for name, value in data.items() if name not in lost}
    if second:
        data = {V2_NAMES.get(name, name): value for name, value in data.items()}
    op = "fused_infer_attention_score" + ("_v2" if second else "")
    accept = {"SUCCESS": True, "FAILED": False}[cells["expectResult"]]
    return VendorRow(table, cells["case_name"], op, data, accept, TABLES[table], tuple(lost))


def _arguments(cells: dict[str, str]) -> dict[str, Any]:
    data: dict[str, Any] = {name: _tensor(cells, name) for name in TENSORS}
    data |= {name: _lengths(cells, name) for name in LISTS}
    data |= {name: int(cells[name]) for name in INTEGERS if cells[name] not in ("", "0")}
    data["scale"] = float(cells["scale"])
    data["input_layout"] = cells["input_layout"]
    data["softmax_lse_flag"] = cells["softmax_lse_flag"] == "1"
    outputs = [_tensor(cells, name) for name in ("attention_out", "softmax_lse")]
    data["out"] = [tensor for tensor in outputs if tensor is not None]
    return {name: value for name, value in data.items() if value not in (None, [])}


def _tensor(cells: dict[str, str], name: str) -> Any:
    shape = cells[f"{name}_shape"]
    if not shape:
        return None
    dtype = DTYPES[cells[f"{name}_dtype"]]
    entries = [
        {"shape": [int(size) for size in part.split()], "dtype": dtype} for part in shape.split("|")
    ]
    return entries if len(entries) > 1 else entries[0]


def _lengths(cells: dict[str, str], name: str) -> list[int] | None:
    return [int(value) for value in cells[f"{name}_data"].split()] or None

"""check() and torch_npu on the emulated device refuse the same calls, for every sample.

torch_npu's own checks come first, then the aclnn operator's, which are the contracts on what
torch_npu made of the call. Where the two differ, torch_npu changed the call or decides alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ascend_attn_ops as ops
from ascend_attn_ops.arguments import parameters
from ascend_attn_ops.emulator import Emulator

OPERATORS = [op for op in ops.all_operators() if "torch_npu" in op.npu_calls]
# (operator, sample): families where check() refuses and torch_npu 2.13 does not, and why that is so
STRICTER: dict[tuple[str, str], tuple[str, str]] = {
    ("sparse_flash_attention", "no_value_on_the_host"): (
        "A2 A3 A5",
        "our provider passes the key for a missing value; a caller of torch_npu may not rely on it",
    ),
    ("sparse_flash_attention", "broken_value_given"): ("A2 A3 A5", "as above"),
    ("rotary_position_embedding", "broken_same_dtype"): (
        "A2 A3 A5",
        "torch_npu casts r1 and r2 to the dtype of the input, a copy on every call",
    ),
    ("rotary_position_embedding", "broken_rotary_mode"): (
        "A5",
        "on Ascend950 torch_npu takes a mode that it does not know as half",
    ),
}


def on_device(value: Any) -> Any:
    """An NPU tensor like this one, with undefined data where it has none."""
    if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        return tuple(on_device(entry) for entry in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "cpu":
        return value.npu()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")


def vendor_error(op: ops.Operator[Any], record: Any) -> str | None:
    """What torch_npu, or the aclnn operator below it, says against a call."""
    arguments = {p.name: on_device(getattr(record, p.name)) for p in parameters(op.record)}
    moved = op.record(**arguments)
    try:
        op.providers["torch_npu"].run(moved)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_check_and_vendor_agree(op: ops.Operator[Any], npu: Emulator, family: str) -> None:
    accepted, refused, wrong = 0, 0, []
    with npu.without_kernels():
        for sample in op.samples():
            record = ops.from_data(op.record, sample.data)
            rules = [refusal.rule for refusal in ops.check(op, record, npu.profile)]
            error = vendor_error(op, record)
            accepted, refused = accepted + (not rules), refused + bool(rules)
            families, _reason = STRICTER.get((op.name, sample.name), ("", ""))
            expected = bool(rules) and family not in families.split()
            if (error is not None) != expected:
                wrong.append(f"{sample.name}: check() says {rules}, torch_npu {error}")
    assert wrong == []
    assert refused
    assert accepted or npu.profile.operator(op.name).supported is False


def test_a_contract_that_allows_too_much_is_noticed(
    npu: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without check() the emulated operator still refuses what torch_npu passes on."""
    op = ops.lightning_indexer
    sample = next(sample for sample in op.samples() if sample.name == "broken_head_size")
    record = ops.from_data(op.record, sample.data)
    assert "561002" in str(vendor_error(op, record))
    assert "lightning_indexer.head_size" in str(vendor_error(op, record))

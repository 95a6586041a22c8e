"""The aclnn provider without any CANN: why it is not usable, and where it would look."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ascend_attn_ops as ops
from ascend_attn_ops import selection
from ascend_attn_ops.aclnn_abi import signature
from ascend_attn_ops.cli import main
from ascend_attn_ops.providers import aclnn
from ascend_attn_ops.providers.aclnn import arrays, errors, headers, libraries, provider

VARIABLES = (
    "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_EMULATOR_LIBRARIES", "LD_LIBRARY_PATH",
    "ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if aclnn.unavailable_reason() is None:
        pytest.skip("libascendcl.so is loaded in this process")
    libraries.load.cache_clear()


def test_the_reason_is_one_sentence_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    reason = aclnn.unavailable_reason()
    assert reason is not None
    for part in ("libascendcl.so", "ASCEND_HOME_PATH", "set_env.sh", "emulator run"):
        assert part in reason
    with pytest.raises(ops.ProviderUnavailableError, match="no CANN"):
        aclnn.Runtime()
    assert main(["info", "--json"]) == 0
    rows = {row["provider"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["aclnn"]["missing"] == reason
    assert rows["aclnn"]["operators"] == len(aclnn.supported_operators())
    assert rows["cpu"]["missing"] is None
    assert main(["info"]) == 0
    assert "no CANN" in capsys.readouterr().out


def test_a_call_that_asks_for_it_is_refused_with_the_reason() -> None:
    sample = next(s for s in ops.interleave_rope.samples() if not s.rules)
    record = ops.from_data(ops.interleave_rope.record, sample.data)
    tensors = [torch.zeros(t.shape, dtype=t.dtype) for t in (record.x, record.cos, record.sin)]
    with pytest.raises(ops.ProviderUnavailableError, match="no CANN"):
        ops.interleave_rope(*tensors, provider="aclnn")


def test_a_missing_cann_ops_transformer_says_how_to_get_it() -> None:
    sample = next(s for s in ops.flash_attn.samples() if not s.rules)
    record = ops.from_data(ops.flash_attn.record, sample.data)
    provider = ops.flash_attn.providers["cann_ops_transformer"]
    (refusal,) = selection.provider_refusals(ops.flash_attn, provider, record, None)
    assert refusal.rule == "provider_available"
    assert "build the ops-transformer package of CANN from source" in refusal.found


def test_every_mapped_operator_has_the_provider_and_no_other() -> None:
    having = {op.name for op in ops.all_operators() if "aclnn" in op.providers}
    assert having == aclnn.supported_operators()


def test_operators_of_atb_say_why_they_have_no_c_call() -> None:
    for op in (ops.paged_attention, ops.reshape_and_cache):
        sample = next(s for s in op.samples() if not s.rules)
        record = ops.from_data(op.record, sample.data)
        with pytest.raises(ops.ProviderUnavailableError, match=r"aclnn: .*ATB.*C\+\+ classes"):
            selection.checked_provider(op, record, None, "aclnn")
    record = ops.from_data(ops.compressor.record, next(ops.compressor.samples()).data)
    with pytest.raises(ops.ProviderUnavailableError, match="compressor has no such provider"):
        selection._named(ops.compressor, record, None, "aclnn")


HEADER = """/* aclnnFlashAttnMetadataGetWorkspaceSize(wrong); */
__attribute__((visibility("default"))) aclnnStatus aclnnFlashAttnMetadataGetWorkspaceSize(
    const aclTensor *cuSeqlensQOptional,   // (B+1,), starts with 0
    const aclTensor *cuSeqlensKvOptional, const aclTensor *seqUsedQOptional,
    const aclTensor *sequsedKv, int64_t numHeadsQ, int64_t numHeadsKv, int64_t headDim,
    int64_t batchSize, int64_t maxSeqlenQ, int64_t maxSeqlenKv, int64_t maskMode,
    int64_t winLeft, int64_t winRight, char *layoutQ, char *layoutKv, const char layoutOut[],
    const aclTensor *metadataOut, uint64_t *workspaceSize, aclOpExecutor **executor);
"""


@pytest.mark.parametrize("place", ["include/aclnnop", "custom"])
def test_an_undocumented_order_is_used_where_the_header_confirms_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = signature("aclnnFlashAttnMetadata")
    folder = tmp_path / place
    if place == "custom":
        monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(folder))
        folder = folder / "op_api" / "include"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    reason = headers.unconfirmed_order(form)
    assert reason is not None
    assert "aclnn_flash_attn_metadata.h" in reason
    folder.mkdir(parents=True)
    path = folder / "aclnn_flash_attn_metadata.h"
    path.write_text(HEADER)
    assert headers.unconfirmed_order(form) is None
    path.write_text(
        HEADER.replace("int64_t winLeft, int64_t winRight", "int64_t winRight, int64_t winLeft")
    )
    reason = headers.unconfirmed_order(form)
    assert reason is not None
    assert "win_right, win_left" in reason
    path.write_text("// nothing")
    assert "(nothing)" in str(headers.unconfirmed_order(form))


def test_a_real_cann_without_the_header_refuses_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cann:
        emulated = False

        def has(self, name: str) -> bool:
            return True

    class Runtime:
        family = "A5"

    monkeypatch.setattr(libraries, "load", Cann)
    monkeypatch.setattr(provider, "default_runtime", Runtime)
    sample = next(s for s in ops.flash_attn.samples() if not s.rules)
    record = ops.from_data(ops.flash_attn.record, sample.data)
    gap = ops.flash_attn.providers["aclnn"].gap
    assert "is in no document" in str(gap(record))
    monkeypatch.setattr(Cann, "emulated", True)
    assert gap(record) is None
    monkeypatch.setattr(Cann, "has", lambda self, name: False)
    assert gap(record) == "this CANN has no aclnnFlashAttn"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(32, 64), (17, 33), (3, 1, 5)])
def test_fractal_nz_is_the_documented_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Element (m, n) of a matrix lies at [n // w, m // 16, m % 16, n % w]."""
    tensor = torch.arange(1, 1 + math.prod(shape)).remainder(127).view(shape).to(dtype)
    found = arrays.fractal_nz_array(tensor.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert found.layout.storage is not None
    tiles, width = found.owner, found.layout.storage[-1]
    assert tuple(tiles.shape) == found.layout.storage
    assert width == (32 if dtype == torch.int8 else 16)
    for *lead, m, n in itertools.product(*map(range, shape)):
        place = (*lead, n // width, m // 16, m % 16, n % width)
        assert tiles[place] == tensor[(*lead, m, n)]
    assert tiles.double().sum() == tensor.double().sum()  # the rest is 0
    assert torch.equal(arrays.plain_tensor(tiles, shape), tensor)
    assert found.layout.bytes == tiles.nbytes
    assert str(found.layout).endswith("with format FRACTAL_NZ")


def test_a_vector_has_no_fractal_nz() -> None:
    with pytest.raises(aclnn.ArrayError, match="found 1 dimensions; allowed: at least 2"):
        arrays.fractal_nz_array(torch.zeros(16))


def put(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"")
    return folder / name


def test_libraries_are_found_through_the_home_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "lib64", "libascendcl.so")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert libraries._located("libascendcl.so") == str(path)
    assert aclnn.unavailable_reason() is None
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere::{tmp_path / 'lib64'}")
    assert libraries._located("libascendcl.so") == str(path)


def test_custom_operators_come_first_in_the_order_of_their_vendors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = put(tmp_path / "mine" / "op_api" / "lib", "libcust_opapi.so")
    vendors = tmp_path / "opp" / "vendors"
    found = {v: put(vendors / v / "op_api" / "lib", "libcust_opapi.so") for v in ("a", "b")}
    (vendors / "config.ini").write_text("# order\nload_priority=b, a,absent\n")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path / 'mine'}:")
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "opp"))
    assert list(libraries.custom_libraries()) == [mine, found["b"], found["a"]]
    (vendors / "config.ini").unlink()
    assert list(libraries.custom_libraries()) == [mine]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (161001, aclnn.NullPointerError),
        (161002, aclnn.InvalidArgumentError),
        (207001, aclnn.OutOfDeviceMemoryError),
        (561002, aclnn.TilingError),
        (561103, aclnn.CannError),
        (4, aclnn.CannError),
    ],
)
def test_errors_say_code_symbol_and_text(code: int, kind: type[aclnn.CannError]) -> None:
    error = errors.error_for(code, "aclnnX", "the text")
    assert type(error) is kind
    assert isinstance(error, ops.AttentionOperatorError)
    assert str(error).startswith(f"aclnnX returned {code}: ")
    assert str(error).endswith("; the text")


def view_of(array: arrays.HostArray) -> Any:
    """The elements that CANN would read."""
    layout = array.layout
    owner = array.owner
    flat = owner if isinstance(owner, torch.Tensor) else torch.from_numpy(owner)
    return torch.as_strided(flat, layout.shape, layout.strides).tolist()


def test_arrays_are_described_without_a_copy_where_strides_allow() -> None:
    base = torch.arange(24, dtype=torch.int32).view(4, 6)
    for view in (base, base.t(), base[1:, ::2], base.expand(3, 4, 6)):
        found = arrays.host_array(view)
        assert found.address == view.data_ptr()
        assert found.layout.shape == tuple(view.shape)
        last = found.address + found.layout.bytes
        assert last <= base.data_ptr() + base.numel() * 4
        assert view_of(found) == view.tolist()
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    assert arrays.host_array(array[1:, ::2]).address == array[1:].ctypes.data
    backwards = arrays.host_array(array[::-1])
    assert view_of(backwards) == array[::-1].tolist()
    assert backwards.owner is not array


def test_layouts_without_elements_and_without_axes() -> None:
    assert arrays.contiguous("float32", (2, 0, 3)).bytes == 0
    assert arrays.contiguous("bfloat16", ()).bytes == 2
    assert arrays.contiguous("float16", (2, 3, 4)).strides == (12, 4, 1)
    with pytest.raises(aclnn.ArrayError, match="found 'float99'"):
        arrays.contiguous("float99", (1,))
    with pytest.raises(aclnn.ArrayError, match="allowed: cpu"):
        arrays.host_array(torch.empty(2, device="meta"))

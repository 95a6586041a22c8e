"""Parts of the emulator that need neither torch_npu nor a compiler."""

from __future__ import annotations

import ast
import ctypes
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ascend_attn_ops import _torch_import, aclnn_abi, emulator
from ascend_attn_ops.aclnn_abi import signatures
from ascend_attn_ops.emulator import (
    abi,
    builder,
    cli,
    dispatch,
    elf,
    nz,
    preload,
    requirements,
    runtime,
    soc,
    wheel,
)
from ascend_attn_ops.emulator.record import Counters

CSRC = Path(builder.__file__).with_name("csrc")


def test_exported_names_are_pinned() -> None:
    assert set(emulator.__all__) == {
        "AclnnError", "AlreadyActiveError", "Build", "BuildError", "Call", "Counters", "Emulator",
        "EmulatorError", "EmulatorOptionError", "EmulatorUnavailableError", "Recording",
        "TensorArgument", "activate", "build", "current", "emulated_profile", "implemented",
        "kernel", "provide_cann_ops_transformer", "unavailable_reason",
    }  # fmt: skip
    assert set(aclnn_abi.__all__) == {
        "CTYPES", "ROLES", "Parameter", "Signature", "SignatureError", "UnknownSignatureError",
        "VendorDtype", "codes", "dtype_number", "dtypes", "formats", "known_signatures",
        "signature", "vendor_dtypes",
    }  # fmt: skip


def test_a_signature_is_read() -> None:
    parsed = signatures.parse(
        "aclnnX", "selfRef!, mask?, ints seqLens?, double scaleValue -> out, lseOut?, int8 cubeType"
    )
    assert [tuple(parameter) for parameter in parsed.parameters] == [
        ("self_ref", "tensor", False, "mutated"),
        ("mask", "tensor", True, "input"),
        ("seq_lens", "ints", True, "input"),
        ("scale_value", "double", False, "input"),
        ("out", "tensor", False, "output"),
        ("lse_out", "tensor", True, "output"),
        ("cube_type", "int8", False, "input"),
    ]
    assert parsed.argument_types[3] is ctypes.c_double
    assert [parameter.name for parameter in parsed.written] == ["self_ref", "out", "lse_out"]


@pytest.mark.parametrize("text", ["a b c -> out", "number x -> out", "x y!? -> out", "-x"])
def test_a_bad_signature_is_named(text: str) -> None:
    with pytest.raises(aclnn_abi.SignatureError, match="aclnnX: cannot read"):
        signatures.parse("aclnnX", text)


def test_every_recorded_signature_can_be_read() -> None:
    for name in aclnn_abi.known_signatures():
        parsed = aclnn_abi.signature(name)
        names = [parameter.name for parameter in parsed.parameters]
        assert len(names) == len(set(names)), name
        assert parsed.written, name
    with pytest.raises(aclnn_abi.UnknownSignatureError, match="aclnnNoSuch"):
        aclnn_abi.signature("aclnnNoSuch")


def test_every_kernel_has_a_signature_and_every_signature_a_kernel() -> None:
    implemented = dispatch.load_kernels()
    assert implemented.keys() <= aclnn_abi.known_signatures()
    without = aclnn_abi.known_signatures() - implemented.keys()
    assert not without, f"recorded, but not emulated: {sorted(without)}"


def test_dtypes_are_torch_dtypes() -> None:
    for number, name in aclnn_abi.dtypes().items():
        assert isinstance(getattr(torch, name), torch.dtype), name
        assert aclnn_abi.dtype_number(name) == number
    (hifloat8,) = aclnn_abi.vendor_dtypes().values()
    assert abi.DTYPES[hifloat8.number] is torch.uint8


def test_the_structures_of_python_and_c_name_the_same_fields() -> None:
    """Sizes are compared when the library is loaded; names and order here."""
    text = (CSRC / "opapi.h").read_text()
    for structure, name in (
        (abi.TensorHandle, "aclTensor"),
        (abi.ScalarHandle, "aclScalar"),
        (abi.ArrayHandle, "array"),
    ):
        body = re.search(rf"struct {name} {{(.*?)}};", text, re.DOTALL)
        assert body is not None
        declared = re.sub(r"\[[^\]]*\]|\w+ (?=[\w*])|\*", "", body[1]).replace(";", ",")
        fields = [field.strip() for field in declared.split(",") if field.strip()]
        assert fields == [field[0] for field in structure._fields_]


def test_handle_sizes_that_differ_are_refused() -> None:
    sizes = {1: abi.TensorHandle, 2: abi.ScalarHandle, 3: abi.ArrayHandle}
    abi.check_layout(lambda kind: ctypes.sizeof(sizes[kind]))
    with pytest.raises(emulator.EmulatorError, match="ScalarHandle: 99 bytes"):
        abi.check_layout(lambda kind: 99 if kind == 2 else ctypes.sizeof(sizes[kind]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(16, 16), (40, 50), (2, 3, 17, 33)])
def test_private_layout_round_trip(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    stored_shape = nz.nz_shape(shape, dtype)
    stored = nz.to_nz(plain, stored_shape)
    assert torch.equal(nz.from_nz(stored, shape), plain)
    width = 32 if dtype is torch.int8 else 16
    piece, inside = divmod(shape[-1] - 1, width)  # where the last element of row 1 must lie
    assert (
        stored.reshape(-1, *stored_shape[-4:])[0, piece, 0, 1, inside]
        == plain.flatten(0, -3)[0, 1, -1]
        if plain.dim() > 2
        else stored[piece, 0, 1, inside] == plain[1, -1]
    )


def test_counters_subtract_and_name_what_is_missing() -> None:
    span = Counters({"launches": 5, "frees": 2}) - Counters({"launches": 2, "frees": 2})
    assert dict(span) == {"launches": 3, "frees": 0}
    assert span.launches == 3
    assert repr(span) == "Counters({'launches': 3})"
    with pytest.raises(AttributeError, match="no counter 'lunches'"):
        _ = span.lunches


def test_libraries_are_read_like_the_loader_reads_them() -> None:
    library = next(Path(torch.__file__).parent.glob("lib/libc10.so"))
    found = elf.read_library(library)
    assert found.soname == "libc10.so"
    assert "libc.so.6" in found.needed
    loaded = ctypes.CDLL(str(library))
    for name in sorted(found.defined)[::200]:
        assert hasattr(loaded, name)
    assert found.undefined
    assert not found.undefined & found.defined


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01\x01" + bytes(80), b"#!/bin/sh\n" + bytes(80)])
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(data)
    with pytest.raises((elf.ElfError, ValueError), match=r"libx\.so|empty"):
        elf.read_library(path)


def test_soc_header_holds_the_figures_of_the_profile() -> None:
    text = soc.header(emulator.emulated_profile("A3"))
    assert '#define EMULATOR_SOC_NAME "Ascend910_9391"' in text
    assert "#define EMULATOR_VECTOR_CORES 48" in text
    assert "#define EMULATOR_MEMORY_BYTES 68719476736ULL" in text
    assert soc.memory_bytes(emulator.emulated_profile("A5")) == 64 << 30  # no source states it


@pytest.mark.parametrize("name", ["310P", "Ascend910A", "GPU"])
def test_other_socs_are_refused(name: str) -> None:
    with pytest.raises(emulator.EmulatorOptionError, match="soc: "):
        emulator.emulated_profile(name)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"devices": 0}, "devices: found 0, allowed: 1 to 16"),
        ({"devices": 17}, "devices: found 17"),
        ({"memory_bytes": 0}, "memory_bytes: found 0"),
        ({"cann": "newest"}, "cann: found 'newest', allowed: a version such as 8.5.0"),
    ],
)
def test_options_that_cannot_be_are_named_before_anything_starts(
    given: dict[str, Any], text: str
) -> None:
    defaults = {"devices": 1, "memory_bytes": None, "cann": "9.1.0", "dump": False}
    with pytest.raises(emulator.EmulatorOptionError, match=text):
        runtime.options(emulator.emulated_profile("A3"), **{**defaults, **given})
    declared = re.search(r"#define MAX_DEVICES (\d+)", (CSRC / "emulator.h").read_text())
    assert declared is not None
    assert int(declared[1]) == runtime.MOST_DEVICES


def test_a_call_log_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    made = emulator.Build(tmp_path, {}, fresh=False)
    monkeypatch.setattr(cli, "build", lambda profile, hide: made)
    log = tmp_path / "file" / "calls.jsonl"
    assert cli.main(["run", "--calls", str(log), "--", "python", "-V"]) == cli.USAGE
    assert f"calls: {log} cannot be written" in capsys.readouterr().err


def test_a_kernel_without_a_recorded_signature_says_what_to_give() -> None:
    with pytest.raises(aclnn_abi.UnknownSignatureError, match=r"kernel.*arguments='self -> out'"):
        emulator.kernel("aclnnNoSuch")(lambda a: a.self)


def test_a_cache_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ASCEND_EMULATOR_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(requirements, "require", lambda: None)
    monkeypatch.setattr(wheel, "version", lambda: "2.13.0")
    assert cli.main(["build"]) == cli.UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"cannot be written to .*file/cache .*set ASCEND_EMULATOR_CACHE to", line)


def test_a_cann_that_does_not_load_is_named_by_the_import_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch fails where a variable speaks of a CANN that is not there."""
    without_npu(monkeypatch)

    def fail(name: str) -> None:
        raise RuntimeError("Failed to load the backend extension") from ImportError("libhccl.so")

    monkeypatch.setattr(_torch_import.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="backend extension"):
        _torch_import._import_with_backends()  # none of our business
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    with pytest.raises(ImportError, match=r"ASCEND_HOME_PATH=/opt/cann .*libhccl\.so.* unset"):
        _torch_import._import_with_backends()


def without_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"platform": "darwin"}, "runs on Linux on x86_64 and aarch64; this is darwin"),
        ({"ASCEND_HOME_PATH": "/opt/cann"}, r"a real CANN is set up here \(ASCEND_HOME_PATH="),
        ({"wheel": None}, r"torch_npu is not installed; pip install torch_npu==2\.13\.0"),
        ({"CC": "no-such-compiler"}, "no C compiler was found"),
    ],
)
def test_each_obstacle_is_one_sentence(
    setting: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_npu(monkeypatch)
    monkeypatch.setattr(wheel, "folder", lambda: setting.get("wheel", Path("/site/torch_npu")))
    if "platform" in setting:
        monkeypatch.setattr(sys, "platform", setting["platform"])
    for name in setting.keys() & {"ASCEND_HOME_PATH", "CC"}:
        monkeypatch.setenv(name, setting[name])
    reason = emulator.unavailable_reason()
    assert reason is not None
    assert re.search(sentence, reason)
    assert "\n" not in reason
    with pytest.raises(emulator.EmulatorUnavailableError, match=sentence):
        requirements.require()


def test_a_library_folder_with_cann_counts_as_cann(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_npu(monkeypatch)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert _torch_import.cann_setting() is None
    (tmp_path / "libascendcl.so").touch()
    assert str(tmp_path) in str(_torch_import.cann_setting())


def test_command_says_why_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_npu(monkeypatch)
    monkeypatch.setattr(wheel, "folder", lambda: None)
    assert cli.main(["run", "--", "python", "-V"]) == cli.UNAVAILABLE
    assert "torch_npu is not installed" in capsys.readouterr().err
    assert cli.main(["run", "--soc", "B200", "--", "python", "-V"]) == cli.USAGE
    assert "soc: " in capsys.readouterr().err


def test_info_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ASCEND_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(wheel, "folder", lambda: None)
    assert cli.main(["info", "--json"]) == cli.DONE
    data = json.loads(capsys.readouterr().out)
    assert data["torch_npu"] is None
    assert data["builds"] == []
    assert [device["family"] for device in data["socs"]] == ["A2", "A3", "A5"]
    assert "aclnnSparseFlashAttention" in data["operators"]
    assert cli.main(["info", "--operators"]) == cli.DONE
    text = capsys.readouterr().out
    assert "aclnnMatmul" in text
    assert "assumed: no source states it" in text


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"ASCEND_EMULATOR_CACHE": "here"}, "here"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/ascend-attn-ops/emulator"),
        ({"HOME": "/home/me"}, "/home/me/.cache/ascend-attn-ops/emulator"),
    ],
)
def test_where_builds_are_kept(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the compiler runs in another folder: the path must be absolute
    for name in ("ASCEND_EMULATOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert builder.cache_folder() == tmp_path / folder


@pytest.mark.parametrize("command", [[], ["run"], ["build"], ["info"]])
def test_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help"])
    assert caught.value.code == 0
    assert "python -m ascend_attn_ops.emulator run -- python script.py" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["8", "8GB", "-1GiB", "0MiB", "GiB"])
def test_bad_memory_sizes_are_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", f"--memory={text}", "--", "x"])
    assert caught.value.code == 2
    assert f"found {text!r}, allowed: a number with MiB or GiB" in capsys.readouterr().err


def test_an_action_after_an_import_runs_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "late_module.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[ModuleType] = []
    preload.after_import("late_module", seen.append)
    assert seen == []
    import late_module  # type: ignore[import-not-found]

    assert seen == [late_module]
    assert late_module.__spec__.name == "late_module"
    preload.after_import("late_module", seen.append)
    assert len(seen) == 2
    assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_AfterImport"]


def test_the_loader_of_child_processes_imports_only_the_standard_library() -> None:
    for name in ("preload.py", "site/sitecustomize.py"):
        tree = ast.parse(Path(builder.__file__).parent.joinpath(name).read_text())
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        imported |= {
            str(node.module).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        assert imported <= sys.stdlib_module_names


def test_no_emulator_is_active_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_current", None)
    monkeypatch.delenv(preload.FOLDER_VARIABLE, raising=False)
    with pytest.raises(emulator.EmulatorError, match="no emulator is active"):
        emulator.current()

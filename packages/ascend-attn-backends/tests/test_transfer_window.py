from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from attn_backends_support import Scenario
from draft_flash_support import layer_of, run_draft

from ascend_attn_backends import (
    AscendFlashAttentionMetadataBuilder,
    TransferWindowError,
    attention_transfer_window,
    transfer_listener,
)
from ascend_attn_ops import OpArgumentError


class Diary:
    """Writes down what it is told, or fails at one of the calls."""

    def __init__(self, name: str, told: list[str], fails_at: str = "") -> None:
        self.name, self.told, self.fails_at = name, told, fails_at

    def _note(self, what: str) -> None:
        self.told.append(f"{self.name} {what}")
        if what == self.fails_at:
            raise OSError(f"{self.name} fails at {what}")

    def attention_started(self) -> None:
        self._note("started")

    def attention_ended(self) -> None:
        self._note("ended")

    def attention_failed(self, error: BaseException) -> None:
        self._note(f"failed {type(error).__name__}")


@pytest.fixture
def told() -> list[str]:
    return []


def test_start_and_end_in_order(told: list[str]) -> None:
    with transfer_listener(Diary("a", told)), transfer_listener(Diary("b", told)):
        with attention_transfer_window():
            told.append("attention")
        with attention_transfer_window():
            told.append("again")
    once = ["a started", "b started", "attention", "b ended", "a ended"]
    assert told == [*once, *(line.replace("attention", "again") for line in once)]


def test_a_failure_reaches_listeners_and_caller(told: list[str]) -> None:
    with transfer_listener(Diary("a", told)), transfer_listener(Diary("b", told)):
        with pytest.raises(KeyError, match="kernel"), attention_transfer_window():
            raise KeyError("kernel")
        with attention_transfer_window():
            told.append("the next one works")
    assert told[:4] == ["a started", "b started", "b failed KeyError", "a failed KeyError"]
    assert told[4:] == ["a started", "b started", "the next one works", "b ended", "a ended"]


def test_an_interruption_is_a_failure_too(told: list[str]) -> None:
    with (
        transfer_listener(Diary("a", told)),
        pytest.raises(KeyboardInterrupt),
        attention_transfer_window(),
    ):
        raise KeyboardInterrupt
    assert told == ["a started", "a failed KeyboardInterrupt"]


def test_a_listener_that_cannot_start_stops_the_call(told: list[str]) -> None:
    first, second = Diary("a", told), Diary("b", told, fails_at="started")
    with (
        transfer_listener(first),
        transfer_listener(second),
        pytest.raises(OSError, match="b fails"),
        attention_transfer_window(),
    ):
        told.append("attention")
    assert told == ["a started", "b started", "a failed OSError"]
    with attention_transfer_window():  # the window is closed again
        told.append("attention")


def test_a_listener_that_fails_at_the_end_is_not_hidden(told: list[str]) -> None:
    first, second = Diary("a", told), Diary("b", told, fails_at="ended")
    with (
        transfer_listener(first),
        transfer_listener(second),
        pytest.raises(OSError, match="b fails"),
        attention_transfer_window(),
    ):
        told.append("attention")
    assert told == ["a started", "b started", "attention", "b ended", "a failed OSError"]


def test_nested_windows_are_refused_and_the_outer_one_goes_on(told: list[str]) -> None:
    with transfer_listener(Diary("a", told)), attention_transfer_window():
        with pytest.raises(TransferWindowError, match="one at a time"):
            attention_transfer_window().__enter__()
        told.append("attention")
    assert told == ["a started", "attention", "a ended"]
    with attention_transfer_window():
        pass


def test_another_thread_has_a_window_of_its_own() -> None:
    done = []

    def work() -> None:
        with attention_transfer_window():
            done.append(True)

    with attention_transfer_window():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=30)
        contextvars.Context().run(work)
    assert done == [True, True]


def test_removed_listeners_hear_nothing(told: list[str]) -> None:
    diary = Diary("a", told)
    with transfer_listener(diary), transfer_listener(diary):
        pass
    with attention_transfer_window():
        pass
    assert told == []


def test_each_layer_of_the_draft_backend_opens_one_window(told: list[str]) -> None:
    scenario = Scenario([3, 1], [20, 9], head_size=64)
    with transfer_listener(Diary("a", told)):
        for _ in range(3):
            run_draft(scenario)
    assert told == ["a started", "a ended"] * 3


def test_a_refused_operator_call_fails_the_window(told: list[str]) -> None:
    scenario = Scenario([3, 1], [20, 9], head_size=64)
    metadata = AscendFlashAttentionMetadataBuilder(16).build(scenario.batch())
    caches = (scenario.key_cache, scenario.value_cache.double())
    output = torch.empty_like(scenario.query)
    with transfer_listener(Diary("a", told)), pytest.raises(OpArgumentError, match="dtype"):
        layer_of(scenario).forward(scenario.query, *caches, metadata, output)
    assert told == ["a started", "a failed OpArgumentError"]


def test_the_backend_inside_an_open_window_is_refused() -> None:
    scenario = Scenario([3, 1], [20, 9], head_size=64)
    with attention_transfer_window(), pytest.raises(TransferWindowError):
        run_draft(scenario)

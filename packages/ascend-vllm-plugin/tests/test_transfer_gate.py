"""Transfers and attention calls exclude each other; threads meet at events, not at times."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ascend_attn_backends import attention_transfer_window, transfer_listener
from ascend_vllm_plugin import TransferGate

PATIENCE = 30.0


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as threads:
        yield threads


def waits(gate, monkeypatch):
    """An event that is set when somebody begins to wait at the gate."""
    waiting = threading.Event()
    original = gate._changed.wait

    def wait(timeout=None):
        waiting.set()
        return original(timeout)

    monkeypatch.setattr(gate._changed, "wait", wait)
    return waiting


def test_a_transfer_waits_for_the_end_of_the_window(pool, monkeypatch):
    gate, order = TransferGate(), []
    waiting = waits(gate, monkeypatch)

    def transfer():
        with gate.transfer():
            order.append("transfer")

    with transfer_listener(gate):
        with attention_transfer_window():
            assert not gate.is_open
            moved = pool.submit(transfer)
            assert waiting.wait(PATIENCE)
            order.append("attention")
        moved.result(PATIENCE)
    assert order == ["attention", "transfer"]
    assert gate.is_open


def test_attention_waits_for_transfers_that_have_begun(pool, monkeypatch):
    gate, order = TransferGate(), []
    waiting = waits(gate, monkeypatch)

    def attention():
        with attention_transfer_window():
            order.append("attention")

    with transfer_listener(gate):
        with gate.transfer():
            computed = pool.submit(attention)
            assert waiting.wait(PATIENCE)
            order.append("transfer")
        computed.result(PATIENCE)
    assert order == ["transfer", "attention"]


def test_windows_of_several_threads_and_transfers_of_several_threads_go_together(pool):
    gate = TransferGate()
    meeting = threading.Barrier(2, timeout=PATIENCE)

    def attention():
        with attention_transfer_window():
            meeting.wait()

    def transfer():
        with gate.transfer():
            meeting.wait()

    with transfer_listener(gate):
        for work in (attention, transfer):
            for future in [pool.submit(work), pool.submit(work)]:
                future.result(PATIENCE)


@pytest.mark.parametrize("where", ["window", "transfer"])
def test_a_failure_leaves_the_gate_open(where):
    gate = TransferGate()
    with transfer_listener(gate):
        with (
            pytest.raises(KeyError),
            attention_transfer_window() if where == "window" else (gate.transfer()),
        ):
            raise KeyError(where)
        with gate.transfer():
            pass
        with attention_transfer_window():
            pass

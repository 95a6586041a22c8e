"""Run the real demo code around the fake server."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from ascend_demo.server import ServerSettings, choose_port

HERE = Path(__file__).parent


def fake_settings(
    mode: str, folder: Path, *, port: int | None = None, ready: float = 120.0, grace: float = 5.0
) -> ServerSettings:
    port = port or choose_port(None)
    return ServerSettings(
        command=(sys.executable, str(HERE / "fake_server.py"), mode, str(port)),
        environment={
            **os.environ,
            "FAKE_PIDS": str(pids_file(folder)),
            "ASCEND_VLLM_ROUTING_FILE": str(folder / "routing.json"),
        },
        port=port,
        log=folder / "server.log",
        ready_seconds=ready,
        grace_seconds=grace,
    )


def pids_file(folder: Path) -> Path:
    return folder / "pids"


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def pids_of(folder: Path) -> list[int]:
    """Process ids of the fake server and its worker, once it wrote both."""
    assert wait_for(lambda: pids_file(folder).is_file() and " " in pids_file(folder).read_text())
    return [int(word) for word in pids_file(folder).read_text().split()]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(pids: list[int], seconds: float = 120.0) -> bool:
    return wait_for(lambda: not any(runs(pid) for pid in pids), seconds)

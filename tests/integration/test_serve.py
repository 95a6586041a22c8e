"""`ascend-vllm serve`: vLLM's own server, through the plugin, on this machine alone."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from engines import REPOSITORY, environment
from tiny_models import make_sliding_qwen3

sys.path.insert(0, str(REPOSITORY / "tools"))

from ascend_demo.server import ServerSettings, choose_port, serving

from ascend_vllm_plugin import read_routing

pytestmark = pytest.mark.engine

MODEL_NAME = "tiny"
OPTIONS = (
    *("--served-model-name", MODEL_NAME, "--skip-tokenizer-init"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
)
LOOPBACK = {"0100007F"}
"""127.0.0.1 as /proc/net/tcp writes it."""


def settings(model: Path, folder: Path) -> ServerSettings:
    """The command as a user types it, and a routing file to look at."""
    port = choose_port(None)
    command = (sys.executable, "-m", "ascend_vllm_plugin", "serve", str(model), "--profile", "A3")
    return ServerSettings(
        command=(*command, "--port", str(port), *OPTIONS),
        environment=environment(
            simulate=False, ASCEND_VLLM_ROUTING_FILE=str(folder / "routing.json")
        ),
        port=port,
        log=folder / "server.log",
    )


def complete(port: int, prompt: list[int]) -> dict[str, Any]:
    """What the server answers to a prompt of tokens."""
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    body = json.dumps({**asked, "model": MODEL_NAME, "detokenize": False})
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return dict(json.loads(text))


def listeners(port: int) -> set[str]:
    """Addresses on which somebody listens to a port (state 0A in /proc/net/tcp, and tcp6)."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            address, _, state = line.split()[1:4]
            host, _, number = address.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(host)
    return found


def test_the_server_answers_through_our_backends_on_this_machine_alone(tmp_path: Path) -> None:
    wanted = settings(make_sliding_qwen3(tmp_path / "model"), tmp_path)
    with serving(wanted):
        answers = [complete(wanted.port, [5, 6, 7, 8])["choices"][0]["token_ids"] for _ in range(2)]
        assert listeners(wanted.port) == LOOPBACK
    assert len(answers[0]) == 6
    assert answers[0] == answers[1]
    table = read_routing(tmp_path / "routing.json")
    assert table.profile.startswith("Ascend910_93")
    assert [row.backend for row in table.rows] == ["standard"]

"""Stands in for vLLM's server: `fake_server.py MODE PORT`, behaves well or badly as MODE says.

Every mode first starts a worker process and writes both process ids to the file $FAKE_PIDS.
$FAKE_ROUTING, when set, is a folder with the routing tables to write: start.json once the server
is up, end.json to answer with when its worker is asked. $FAKE_PLAIN=1: no counters of speculation.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORKER = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); time.sleep(300)"
CHILD = """
import os, time
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.1)
"""
PIECES = ["Paris ", "is the ", "capital."]


def refusal(parameter: str, source: str) -> dict[str, str | None]:
    """A refusal as a routing table has it."""
    said = {"rule": parameter, "parameter": parameter, "found": "False", "allowed": "True"}
    return {**said, "source": source, "cann_code": None}


ROUTING = {
    "format": 2,
    "mode": "simulated",
    "profile": "A5",
    "vllm": "0.30.0",
    "model": "fake",
    "speculation": {"method": "custom_class", "drafter": "fake.Drafter", "k": 2},
    "rows": [
        {
            "role": "target",
            "kind": "target, full attention",
            "layers": ["layer.0", "layer.1"],
            "backend": "standard",
            "backend_class": "fake.Standard",
            "chosen_by": "selection",
            "request": {"use_mla": False},
            "verdicts": [
                {"backend": "standard", "refusals": []},
                {"backend": "fa3", "refusals": [refusal("consistency", "fake rule book")]},
                {"backend": "mla", "refusals": [refusal("use_mla", "a book of strangers")]},
            ],
            "gate": [],
        }
    ],
    "plans": None,
}


class Counters:
    """What /metrics tells: each request adds 4 drafts; 3 and 1 of them are accepted."""

    requests = 0

    @classmethod
    def text(cls) -> str:
        number = cls.requests
        values = {
            "drafts_total{}": 4 * number,
            "draft_tokens_total{}": 8 * number,
            "accepted_tokens_total{}": 4 * number,
            'accepted_tokens_per_pos_total{position="0"}': 3 * number,
            'accepted_tokens_per_pos_total{position="1"}': number,
        }
        drafts = {} if os.environ.get("FAKE_PLAIN") else values
        lines = [f"vllm:spec_decode_num_{name} {value}.0" for name, value in drafts.items()]
        lines.append(f"vllm:iteration_tokens_total_count{{}} {5 * number}.0")
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    mode = "ok"
    ready_at = 0.0

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200 if time.monotonic() >= Handler.ready_at else 503, "")
        elif self.path == "/metrics" and Handler.mode != "no-metrics":
            self._answer(200, Counters.text())
        else:
            self._answer(404, "not here")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/collective_rpc":
            text = (Path(os.environ["FAKE_ROUTING"]) / "end.json").read_text()
            self._answer(200, json.dumps({"results": [text]}))
            return
        if Handler.mode == "refuses":
            self._answer(400, json.dumps({"error": {"message": "too long for the model"}}))
            return
        if Handler.mode == "dies":
            os._exit(9)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        chat = "chat" in self.path
        for piece in PIECES:
            said = {"delta": {"content": piece}} if chat else {"text": piece}
            self._event([{"index": 0, "finish_reason": None, **said}])
            time.sleep(0.01)
        nothing = {"delta": {}} if chat else {"text": ""}
        self._event([{"index": 0, "finish_reason": "stop", **nothing}])
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        self._event([], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")
        Counters.requests += 1

    def _event(self, choices: list[dict[str, object]], **more: object) -> None:
        chunk = {
            "id": "1",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "fake",
            "choices": choices,
            **more,
        }
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        return


def main(mode: str, port: int) -> None:
    deaf = mode in ("deaf", "orphan")
    code = WORKER.format("SIG_IGN" if deaf else "SIG_DFL")
    worker = subprocess.Popen([sys.executable, "-c", CHILD if mode == "worker-goes" else code])
    Path(os.environ["FAKE_PIDS"]).write_text(f"{os.getpid()} {worker.pid}")
    print("\x1b[32mINFO\x1b[0m loading the model", flush=True)
    if mode == "crash":
        print("RuntimeError: no such model [/x]", flush=True)
        sys.exit(3)
    if mode == "hang":
        time.sleep(300)
    write_routing(mode)
    Handler.mode = mode
    Handler.ready_at = time.monotonic() + (1.0 if mode == "slow" else 0.0)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)

    def leave(number: int, frame: object) -> None:
        if mode == "ok":
            worker.terminate()
            worker.wait()
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else leave)
    server.serve_forever()
    print("left in good order", flush=True)


def write_routing(mode: str) -> None:
    file = os.environ.get("ASCEND_VLLM_ROUTING_FILE")
    if file and mode != "no-routing":
        folder = os.environ.get("FAKE_ROUTING")
        text = (Path(folder) / "start.json").read_text() if folder else json.dumps(ROUTING)
        Path(file).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

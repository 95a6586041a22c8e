"""Running vLLM engines, and HF transformers, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
TIMEOUT_SECONDS = 1200


@attrs.frozen
class Outcome:
    """What a process left behind."""

    result: dict[str, Any]
    log: str
    folder: Path

    def tokens(self, run: str) -> list[list[int]]:
        """Output token ids of each prompt of a run."""
        found: list[list[int]] = self.result["runs"][run]["tokens"]
        return found

    def steps(self, run: str, layers: int) -> float:
        """Forward passes of a run that our backend took part in."""
        return float(self.result["runs"][run]["calls"]["forward"] / layers)


def environment(simulate: bool, **further: str) -> dict[str, str]:
    """Environment of an engine: offline, one process, 1 GiB of KV cache, patient threads."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "VLLM_")) or name == "ASCEND_DEMO_CACHE"
    }
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # On a busy machine threads that spin take the cores from those that they wait for.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {**clean, **fixed, **({"ASCEND_VLLM_SIMULATE": "1"} if simulate else {}), **further}


def run_python(
    arguments: list[str], env: dict[str, str], timeout: float = TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments; its output is captured, its end is not judged."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_script(
    script: str, job: dict[str, Any], folder: Path, env: dict[str, str]
) -> tuple[Any, str]:
    """Run a script of this folder with a JSON job; return its JSON result and its log."""
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    done = run_python([str(HERE / script), str(job_file), str(result_file)], env)
    log = done.stdout + done.stderr
    if done.returncode != 0:
        raise AssertionError(f"{script} ended with {done.returncode}:\n{log[-6000:]}")
    return json.loads(result_file.read_text(encoding="utf-8")), log


def run_ranks(
    script: str, job: dict[str, Any], folder: Path, env: dict[str, str], ranks: int = 2
) -> list[Any]:
    """Run a script once per rank, in processes that find each other; return their results.

    Each rank has a job, a result and a log in a folder of its own. When one fails or the time is
    over, the others are ended.
    """
    places = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _start_rank(script, job, folder / f"rank{rank}", {**env, **places, **own})
            processes.append(process)
        _wait_for_all(processes, time.monotonic() + TIMEOUT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        if process.returncode != 0:
            log = (folder / f"rank{rank}" / "log.txt").read_text(encoding="utf-8")
            raise AssertionError(f"{script} failed on rank {rank}:\n{log[-6000:]}")
    results = (folder / f"rank{rank}" / "result.json" for rank in range(ranks))
    return [json.loads(path.read_text(encoding="utf-8")) for path in results]


def _start_rank(
    script: str, job: dict[str, Any], folder: Path, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    files = (str(folder / "job.json"), str(folder / "result.json"))
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE / script), *files],
            env=env,
            cwd=HERE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait_for_all(processes: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Return when all have ended, one has failed, or the time is over."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run_engine(
    model: Path,
    runs: list[dict[str, Any]],
    folder: Path,
    *,
    simulate: bool = True,
    **engine: Any,
) -> Outcome:
    """Run one engine in float32 and eager mode, and let it generate."""
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        **engine,
    }
    job = {"engine": arguments, "runs": runs, "simulated": simulate}
    env = environment(simulate)
    if simulate:
        env["ASCEND_VLLM_ROUTING_FILE"] = str(folder / "routing.json")
    result, log = run_script("engine_runner.py", job, folder, env)
    return Outcome(result, log, folder)


def hf_argmax(model: Path, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What HF's own greedy decoding gives; see `hf_check.py`."""
    found: list[dict[str, Any]] = run_script(
        "hf_check.py", {"model": str(model), "cases": cases}, folder, environment(simulate=False)
    )[0]
    return found

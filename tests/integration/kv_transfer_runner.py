"""One vLLM engine with a windowed KV connector: `kv_transfer_runner.py JOB_FILE RESULT_FILE`.

The job is JSON: `engine` (arguments of `vllm.LLM`), `store` (folder of the connector), `role` (what
the engine is to it) and `runs` as `engine_runner.py` has them, each with what happens to the
`store` before it: `kept`, `removed`, or `zeroed`. The fault `attention_fails` makes the second
attention call of its run raise. The result has, per run, tokens, prompt tokens that were not
computed, what windows did, how many files the store gained for each prompt, and the error that
ended the run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_runner

from ascend_attn_backends import transfer_listener
from ascend_vllm_plugin.garbage import postponed


class AttentionError(RuntimeError):
    """What a broken attention call raises."""


class Windows:
    """Counts what transfer windows do, and the connector's work while one is open."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.open = False

    def attention_started(self) -> None:
        self.open = True
        self.counts["started"] += 1

    def attention_ended(self) -> None:
        self.open = False
        self.counts["ended"] += 1

    def attention_failed(self, error: BaseException) -> None:
        self.open = False
        self.counts[f"failed: {error}"] += 1


def watch_connector(windows: Windows) -> None:
    """Count loads and saves of vLLM's own connector, and those inside a window."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    def watch(name: str) -> None:
        original = getattr(ExampleConnector, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            windows.counts[name] += 1
            windows.counts["inside a window"] += windows.open
            return original(self, *args, **kwargs)

        setattr(ExampleConnector, name, watched)

    watch("start_load_kv")
    watch("save_kv_layer")


def change_store(store: Path, change: str) -> None:
    """Do to the stored keys and values what the job says."""
    from safetensors.torch import load_file, save_file

    if change == "removed":
        for folder in store.iterdir():
            shutil.rmtree(folder)
    elif change == "zeroed":
        for file in store.glob("*/*.safetensors"):
            save_file({name: 0 * tensor for name, tensor in load_file(file).items()}, file)


def attention_fails_after(calls: int) -> Callable[[], Callable[[], None]]:
    """A fault for `engine_runner`: the attention call after so many raises."""

    def break_it() -> Callable[[], None]:
        left = [calls]

        def make(original: Any) -> Any:
            def forward(self: Any, *args: Any) -> Any:
                if not left[0]:
                    raise AttentionError("no such kernel")
                left[0] -= 1
                return original(self, *args)

            return forward

        return engine_runner._replace_forward(make)

    return break_it


def run_once(llm: Any, run: dict[str, Any], store: Path, windows: Windows) -> dict[str, Any]:
    """Change the store, generate, and say what happened."""
    change_store(store, run["store"])
    before = set(store.glob("*/*"))
    windows.counts.clear()
    done: dict[str, Any] = {"error": None}
    try:
        done |= engine_runner.generate(llm, run)
    except AttentionError as error:
        done["error"] = str(error)
    gained = Counter(file.parent.name for file in set(store.glob("*/*")) - before)
    return {**done, "windows": dict(windows.counts), "gained": sorted(gained.values())}


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    store, windows = Path(job["store"]), Windows()
    engine_runner.FAULTS["attention_fails"] = attention_fails_after(1)
    with postponed():
        from vllm import LLM

    watch_connector(windows)
    connector = {
        "kv_connector": "WindowedExampleConnector",
        "kv_connector_module_path": "ascend_vllm_plugin.kv_transfer",
        "kv_role": job["role"],
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    llm = LLM(**job["engine"], kv_transfer_config=connector)
    with transfer_listener(windows):
        runs = {run["name"]: run_once(llm, run, store, windows) for run in job["runs"]}
    Path(result_file).write_text(json.dumps({"runs": runs}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

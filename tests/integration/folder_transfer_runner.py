"""Engines with a `FolderConnector`, one after the other: `folder_transfer_runner.py JOB RESULT`.

The job is JSON: `models`, folder -> function of `latent_models.py` and its arguments, made first;
`engines`, a list of `name`, `store` (folder of the connector), `engine` (arguments of `vllm.LLM`)
and `runs` as `engine_runner.py` has them, each with what happens to the `store` before it (see
`CHANGES`); and `reference`, names of engines whose first run transformers is to judge. The result
has, by engine, for each run tokens, prompt tokens that were not computed, counters of speculation
and the files of the store after it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_runner
import latent_models
from latent_runner import reference, started
from safetensors import safe_open

from ascend_vllm_plugin.kv_store import KeyStore, StoredPrompt

Rows = dict[str, Any]


def rewrite(change: Callable[[Rows, Rows], Rows]) -> Callable[[Path], None]:
    """Give each prompt what `change` makes of its rows and those of the longest one, sound files.

    Such files are what an engine with a fault would have stored.
    """

    def changed(store: Path) -> None:
        keys, stored = KeyStore(store, ranks=1), {}
        for path in store.glob("*.safetensors"):
            with safe_open(path, framework="pt") as opened:
                said = opened.metadata()
            prompt = StoredPrompt(said["prompt"], int(said["tokens"]), said["model"])
            stored[prompt] = keys.read(prompt, 0)
        longest = stored[max(stored, key=lambda prompt: prompt.tokens)]
        for prompt, rows in stored.items():
            keys.write(prompt, 0, change(rows, longest))

    return changed


def swapped_layers(rows: Rows, longest: Rows) -> Rows:
    """The first two caches of latents, one in the place of the other."""
    first, second, *_ = [name for name in rows if name.endswith(".attn")]
    return {**rows, first: rows[second], second: rows[first]}


def stale_slots(rows: Rows, longest: Rows) -> Rows:
    """Rows of slots that are the longest prompt's, as if a mapping of another step were used."""
    return {name: longest[name][-len(tensor) :] for name, tensor in rows.items()}


def zeroed(*parts: str) -> Callable[[Path], None]:
    """Zeros in the caches whose name has one of the parts."""

    def change(rows: Rows, longest: Rows) -> Rows:
        chosen = [name for name in rows if any(part in name for part in parts)]
        return rows | {name: 0 * rows[name] for name in chosen}

    return rewrite(change)


def edit_files(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change every file byte by byte."""

    def changed(store: Path) -> None:
        for path in store.glob("*.safetensors"):
            path.write_bytes(change(path.read_bytes()))

    return changed


def renamed(store: Path) -> None:
    """Every prompt has the file of another one."""
    paths = sorted(store.glob("*.safetensors"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def removed(store: Path) -> None:
    """Nothing is stored."""
    for path in store.iterdir():
        path.unlink()


CHANGES: dict[str, Callable[[Path], None]] = {
    "kept": lambda store: None,
    "swapped layers": rewrite(swapped_layers),
    "stale slots": rewrite(stale_slots),
    "no index rows": zeroed(".indexer."),
    "no draft rows": zeroed("layers.3.", "layers.4."),  # the draft of the trained GLM
    "torn": edit_files(lambda content: content[: len(content) // 2]),
    "flipped": edit_files(lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "renamed": renamed,
    "removed": removed,
}


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine; for each run change the store, generate, and put the store back."""
    store, runs = Path(job["store"]), {}
    with started(job["engine"]) as llm:
        for run in job["runs"]:
            sound = {path: path.read_bytes() for path in store.iterdir()}
            CHANGES[run["store"]](store)
            before = engine_runner.speculation_metrics(llm)
            runs[run["name"]] = engine_runner.generate(llm, run)
            after = engine_runner.speculation_metrics(llm)
            runs[run["name"]]["speculation"] = {"before": before, "after": after}
            runs[run["name"]]["files"] = sorted(path.name for path in store.iterdir())
            if run["store"] != "kept":
                removed(store)
                for path, content in sound.items():
                    path.write_bytes(content)
    return {"runs": runs}


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    for folder, (maker, *arguments) in job["models"].items():
        getattr(latent_models, maker)(Path(folder), *arguments)
    result: dict[str, Any] = {"engines": {}, "reference": {}}
    for engine in job["engines"]:
        name = engine["name"]
        result["engines"][name] = run_engine(engine)
        if name in job["reference"]:
            result["reference"][name] = reference(engine, result["engines"][name])
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    os.environ.pop("ASCEND_VLLM_ROUTING_FILE", None)
    main(*sys.argv[1:])

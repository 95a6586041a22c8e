"""vLLM engines with DFlash drafts, one after the other: `draft_runner.py JOB_FILE RESULT_FILE`.

The job is JSON: `engines` (as in `latent_runner.py`), `reference` (a `model` and the `engine` whose
tokens transformers is to judge) and `explain` (name of an engine to be explained as well, after all
engines have run). The result has `engines` by name, `reference`, and the `explained` routing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import draft_faults
import engine_runner
from hf_check import judge
from latent_runner import run_engine


def explained(engine: dict[str, Any]) -> dict[str, Any]:
    """What `ascend-vllm explain` says of an engine."""
    from vllm import EngineArgs

    from ascend_vllm_plugin import explain

    table = explain.explain(explain.configuration(EngineArgs(**engine["engine"])))
    return dict(json.loads(table.to_json()))


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    from ascend_attn_backends import AscendFlashAttentionImpl

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    engine_runner.count(AscendFlashAttentionImpl, "forward", "draft_flash")
    engine_runner.FAULTS.update(draft_faults.FAULTS)
    folder = Path(result_file).parent
    engines = {engine["name"]: engine for engine in job["engines"]}
    result: dict[str, Any] = {"engines": {}}
    for name, engine in engines.items():
        result["engines"][name] = run_engine(engine, folder)
    result["explained"] = explained(engines[job["explain"]])
    reference = job["reference"]
    run = engines[reference["engine"]]["runs"][0]
    outputs = result["engines"][reference["engine"]]["runs"][run["name"]]["tokens"]
    cases = [{"prompt": p, "output": o} for p, o in zip(run["prompts"], outputs, strict=True)]
    result["reference"] = judge(reference["model"], cases)
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

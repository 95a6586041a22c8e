"""Several tiny engines in one process, or in one process per rank: what to ask, what they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
from engines import environment, free_ports, run_ranks
from tiny_models import random_prompts

NUM_TOKENS = 48
NUM_CONTROL_TOKENS = 8
MIN_MARGIN = 5e-4
"""As in test_smollm2.py."""


def engine(
    name: str,
    model: str,
    runs: dict[str, str | None] | None = None,
    prompts: list[list[int]] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """An engine for the runner, with its runs: name -> fault."""
    fixed = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,  # what the prompts need, instead of a GiB for each engine
        "disable_log_stats": False,
    }
    return {
        "name": name,
        "engine": {"model": model, **fixed, **arguments},
        "runs": [
            {
                "name": run,
                "prompts": prompts or random_prompts(),
                "max_tokens": NUM_CONTROL_TOKENS if fault else NUM_TOKENS,
                "fault": fault,
            }
            for run, fault in (runs or {"sound": None}).items()
        ],
    }


@attrs.frozen
class Outcome:
    """What the engines of a process left behind."""

    result: dict[str, Any]
    folder: Path

    @classmethod
    def left_in(cls, folder: Path) -> Outcome:
        """The outcome of a process whose result is in this folder."""
        return cls(json.loads((folder / "result.json").read_text(encoding="utf-8")), folder)

    def run(self, engine: str, run: str = "sound") -> dict[str, Any]:
        found: dict[str, Any] = self.result["engines"][engine]["runs"][run]
        return found

    def tokens(self, engine: str, run: str = "sound") -> list[list[int]]:
        found: list[list[int]] = self.run(engine, run)["tokens"]
        return found

    def reference(self, engine: str) -> list[list[int]]:
        """What transformers gives, greedily, on the weights of this engine."""
        return [case["tokens"] for case in self.result["reference"][engine]]

    def first_of_reference(self, engine: str) -> list[list[int]]:
        """As many tokens of it as a run with a fault has."""
        return [tokens[:NUM_CONTROL_TOKENS] for tokens in self.reference(engine)]

    def drafts(self, engine: str, run: str = "sound") -> tuple[int, int]:
        """Drafted and accepted tokens of a run."""
        counters = self.run(engine, run)["speculation"]
        drafted, accepted = (
            counters["after"][name] - counters["before"][name]
            for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        return drafted, accepted

    def accepted_at(self, engine: str, run: str = "sound") -> list[int]:
        """Accepted tokens of a run, by position of the draft."""
        counters = self.run(engine, run)["speculation"]
        name = "num_accepted_tokens_per_pos"
        pairs = zip(counters["after"][name], counters["before"][name], strict=True)
        return [after - before for after, before in pairs]


def run_on_ranks(engines: list[dict[str, Any]], folder: Path) -> None:
    """Run engines on two ranks, with vLLM's V2 runner; their models are there already."""
    for job, port in zip(engines, free_ports(len(engines)), strict=True):
        job["port"] = port
        job["engine"] |= {"distributed_executor_backend": "external_launcher", "seed": 0}
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Else each engine with tensor parallelism compiles the mask of its vocabulary for seconds.
        "TORCHDYNAMO_DISABLE": "1",
    }
    env = environment(True, **variables)
    job = {"models": {}, "engines": engines, "reference": []}
    run_ranks("latent_runner.py", job, folder, env)

"""One vLLM engine in a process of its own: `engine_runner.py JOB_FILE RESULT_FILE`.

The job is JSON: `engine` (arguments of `vllm.LLM`), `runs` (list of `name`, `prompts` as token
ids, `max_tokens`, optional `one_by_one` and `fault`). A fault breaks the attention backend
for that run on purpose: see `FAULTS`. The result is JSON as well: tokens and cached tokens per
run, metrics of speculation, the platform, and how often our backend computed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CALLS = {"forward": 0, "write_kv": 0}


def count_calls() -> None:
    """Count what our standard backend computes."""
    from ascend_attn_backends import AscendAttentionBackendImpl as Impl

    for name in CALLS:
        _count(Impl, name)


def _count(cls: type, name: str) -> None:
    original = getattr(cls, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return original(self, *args, **kwargs)

    setattr(cls, name, counted)


@contextlib.contextmanager
def fault(name: str | None) -> Iterator[None]:
    """Break the standard backend while the context lasts."""
    if name is None:
        yield
        return
    from ascend_attn_backends import AscendAttentionBackendImpl as Impl

    original = Impl.forward
    Impl.forward = FAULTS[name](original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Impl.forward = original  # type: ignore[method-assign]


def window_one_too_long(original: Any) -> Any:
    """Every token sees one key more than its sliding window allows."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        window = self.sliding_window
        self.sliding_window = window + 1
        try:
            return original(self, *args, **kwargs)
        finally:
            self.sliding_window = window

    return forward


def no_causal_mask(original: Any) -> Any:
    """Tokens of a prompt see the tokens after them."""
    import attrs

    def forward(
        self: Any, query: Any, key_cache: Any, value_cache: Any, metadata: Any, output: Any
    ) -> Any:
        broken = attrs.evolve(metadata, causal=False)
        return original(self, query, key_cache, value_cache, broken, output)

    return forward


FAULTS = {"window_one_too_long": window_one_too_long, "no_causal_mask": no_causal_mask}


def generate(llm: Any, run: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of the run's prompts, in one batch or one after the other."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=run["max_tokens"], temperature=0, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    groups = [[prompt] for prompt in prompts] if run.get("one_by_one") else [prompts]
    outputs: list[Any] = []
    with fault(run.get("fault")):
        for group in groups:
            outputs += llm.generate(group, params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def speculation_metrics(llm: Any) -> dict[str, Any]:
    """vLLM's own counters of speculative decoding."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            found[metric.name.removeprefix("vllm:spec_decode_")] = getattr(
                metric, "value", getattr(metric, "values", None)
            )
    return found


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    if job["count_calls"]:
        count_calls()
    from vllm import LLM
    from vllm.platforms import current_platform

    llm = LLM(**job["engine"])
    result = {
        "runs": {run["name"]: generate(llm, run) for run in job["runs"]},
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "speculation": speculation_metrics(llm),
        "calls": CALLS,
    }
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

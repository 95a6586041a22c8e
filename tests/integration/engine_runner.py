"""One vLLM engine in a process of its own: `engine_runner.py JOB_FILE RESULT_FILE`.

The job is JSON: `engine` (arguments of `vllm.LLM`), `simulated` (whether our backend is there to
be watched) and `runs` (list of `name`, `prompts` as token ids, `max_tokens`, optional
`one_by_one` and `fault`). A fault breaks something on purpose for that run: see `FAULTS`. A
`drafter` is the class of a custom drafter that takes over from that run on, with `options` of this
package if given. The result is JSON: tokens, cached tokens, calls of our backend and steps with a
background drafter per run, vLLM's metrics of speculation and ours, the platform, and the attention
backends of the layers that vLLM built.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ascend_vllm_plugin.garbage import postponed

CALLS: Counter[str] = Counter()
DRAFT_STEPS: list[dict[str, float]] = []
"""Steps with a background drafter: `k` as its gauge shows it, and `seconds` that it took."""


def watch_backend() -> None:
    """Count what our standard backend computes, layer by layer."""
    from ascend_attn_backends import AscendAttentionBackendImpl

    for name in ("forward", "write_kv"):
        count(AscendAttentionBackendImpl, name, name)


def count(cls: type, name: str, counter: str) -> None:
    """Count the calls of a method."""
    original = getattr(cls, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS[counter] += 1
        return original(self, *args, **kwargs)

    setattr(cls, name, counted)


def watch_background_drafts() -> None:
    """Keep what each step asked of a background drafter, and how long it was there."""
    from ascend_vllm_plugin import BackgroundProposer

    original = BackgroundProposer.propose

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        drafts = original(self, *args, **kwargs)
        seconds = time.monotonic() - begun
        k = self.counters.as_dict()["num_speculative_tokens"]
        DRAFT_STEPS.append({"k": k, "seconds": seconds})
        return drafts

    BackgroundProposer.propose = timed  # type: ignore[method-assign]


def _replace_forward(make: Callable[[Any], Any]) -> Callable[[], None]:
    from ascend_attn_backends import AscendAttentionBackendImpl

    original = AscendAttentionBackendImpl.forward
    AscendAttentionBackendImpl.forward = make(original)  # type: ignore[method-assign]
    return lambda: setattr(AscendAttentionBackendImpl, "forward", original)


def window_one_too_long() -> Callable[[], None]:
    """Every token sees one key more than its sliding window allows."""
    from ascend_attn_backends import AscendAttentionBackendImpl

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            wider = AscendAttentionBackendImpl(
                self.num_heads,
                self.head_size,
                self.scale,
                self.num_kv_heads,
                self.sliding_window + 1,
            )
            return original(wider, *args)

        return forward

    return _replace_forward(make)


def no_causal_mask() -> Callable[[], None]:
    """Tokens of a prompt see the tokens after them."""
    import attrs

    def make(original: Any) -> Any:
        def forward(self: Any, query: Any, keys: Any, values: Any, metadata: Any, out: Any) -> Any:
            launches = [attrs.evolve(launch, causal=False) for launch in metadata.launches]
            broken = attrs.evolve(metadata, launches=tuple(launches))
            return original(self, query, keys, values, broken, out)

        return forward

    return _replace_forward(make)


def accept_every_draft() -> Callable[[], None]:
    """Verification takes every draft, whatever the target says."""
    from vllm.v1.sample import rejection_sampler

    from ascend_vllm_plugin.patches.kernel_dispatchers import LaunchableFunction

    dispatcher: Any = rejection_sampler._rejection_greedy_sample
    original = dispatcher.kernel

    def accept(**arguments: Any) -> None:
        given = {name.removesuffix("_ptr"): name for name in arguments}  # as its Triton kernel's
        arguments[given["target_argmax"]] = arguments[given["draft_token_ids"]]
        original[None](**arguments)

    # The dispatcher binds by the parameter names of the kernel that it has launched before.
    dispatcher.kernel = LaunchableFunction(accept)
    return lambda: setattr(dispatcher, "kernel", original)


FAULTS = {
    fault.__name__: fault for fault in (window_one_too_long, no_causal_mask, accept_every_draft)
}


@contextlib.contextmanager
def broken(fault: str | None) -> Iterator[None]:
    """Have the fault while the context lasts."""
    repair = FAULTS[fault]() if fault else lambda: None
    try:
        yield
    finally:
        repair()


def generate(llm: Any, run: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of the run's prompts, in one batch or one after the other."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=run["max_tokens"], temperature=0, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    groups = [[prompt] for prompt in prompts] if run.get("one_by_one") else [prompts]
    outputs: list[Any] = []
    CALLS.clear()
    DRAFT_STEPS.clear()
    with broken(run.get("fault")):
        for group in groups:
            outputs += llm.generate(group, params, use_tqdm=False)
    return {
        "draft_steps": list(DRAFT_STEPS),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "calls": dict(CALLS),
    }


def set_drafter(worker: Any, path: str, options: dict[str, Any]) -> None:
    """Draft with another class, built as vLLM builds the one that the engine was started with.

    Args:
        worker: of vLLM.
        path: the class.
        options: of this package, beside those of the engine, which come back with the next class.
    """
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    config = worker.vllm_config
    config.speculative_config.model = path
    given = config.additional_config
    config.additional_config = {**given, "ascend": {**given["ascend"], **options}}
    worker.model_runner.drafter = create_custom_proposer(config)
    config.additional_config = given


def our_metrics() -> dict[str, float]:
    """What this package adds to the registry that vLLM's server shows on `/metrics`."""
    from prometheus_client import REGISTRY

    return {
        sample.name: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("ascend:")
    }


def speculation_metrics(llm: Any) -> dict[str, Any]:
    """vLLM's own counters of speculative decoding."""
    return {
        metric.name.removeprefix("vllm:spec_decode_"): getattr(
            metric, "value", getattr(metric, "values", None)
        )
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }


def layer_backends(model: Any) -> dict[str, int]:
    """How many layers of the model each attention backend has."""
    classes = [m.attn_backend for m in model.modules() if hasattr(m, "attn_backend")]
    return dict(Counter(f"{cls.__module__}.{cls.__qualname__}" for cls in classes))


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    with postponed():
        if job["simulated"]:
            watch_backend()
            watch_background_drafts()
        from vllm import LLM
        from vllm.platforms import current_platform

    llm = LLM(**job["engine"])
    runs = {}
    for run in job["runs"]:
        if "drafter" in run:
            llm.collective_rpc(set_drafter, args=(run["drafter"], run.get("options", {})))
        before = speculation_metrics(llm)
        runs[run["name"]] = generate(llm, run)
        after = speculation_metrics(llm)
        runs[run["name"]]["speculation"] = {"before": before, "after": after}
        runs[run["name"]]["metrics"] = our_metrics()
    result = {
        "runs": runs,
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "layers": llm.apply_model(layer_backends)[0],
    }
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Ask vLLM's own `get_attn_backend` for target and draft: `gate_probe.py JOB_FILE RESULT_FILE`.

The job is JSON: `cases`, each with a `name`, `target` and `draft` (folders), and what it changes:
`engine` (arguments of `vllm.EngineArgs`), `environment`, `question` (arguments of
`get_attn_backend` for the draft's layers), `as_target` (ask for the draft's layers as the target's)
and `fault`, which takes away what keeps the answers of target and draft apart. No weight is loaded
and no model is built. The result has, for each case, the answers for the target without a draft,
the target and the draft: class, reasons and relaxations, or the error.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

HALF = "float16"


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Have these environment variables while the context lasts."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def without(fault: str | None) -> Iterator[None]:
    """Take `mark_drafts` away (and the forgetting, which would hide the leak), or nothing."""
    from ascend_vllm_plugin import compat, platform_steps

    if fault is None:
        yield
        return
    platform: Any = platform_steps  # whose names a type checker takes for final
    versions: Any = compat
    mark, forget = platform.mark_drafts, versions.forget_selections
    platform.mark_drafts = versions.forget_selections = lambda *_: None
    try:
        yield
    finally:
        platform.mark_drafts, versions.forget_selections = mark, forget


def configuration(case: dict[str, Any], *, speculate: bool) -> Any:
    """The engine's configuration, as vLLM's server would make it."""
    from vllm import EngineArgs

    arguments = {
        "model": case["target"],
        "dtype": HALF,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        **case.get("engine", {}),
    }
    if speculate:
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": case["draft"],
            "num_speculative_tokens": 4,
            **case.get("speculative", {}),
        }
    return EngineArgs(**arguments).create_engine_config()


def of_the_draft(config: Any) -> Any:
    """The configuration under which vLLM's drafters build their layers."""
    import torch
    from vllm.v1.spec_decode.dflash import DFlashProposer

    return DFlashProposer(config, torch.device("meta"))._create_draft_vllm_config()


def answer(config: Any, tag: Any, question: dict[str, Any], role: str) -> dict[str, Any]:
    """What vLLM answers for a layer, and what the plugin remembers of it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention import selector

    from ascend_attn_backends import NoBackendError
    from ascend_vllm_plugin import selection

    with set_current_vllm_config(config), tag:
        try:
            backend = selector.get_attn_backend(
                dtype=config.model_config.dtype,
                kv_cache_dtype=config.cache_config.cache_dtype,
                **question,
            )
        except NoBackendError as error:
            return {"error": str(error)}
    found: dict[str, Any] = {"class": backend.__name__}
    for kind, route in selection.recorded_routes().items():
        if kind.role == role:
            found["chosen by"] = route.chosen_by
            found.update({} if route.selection is None else _reasons(route.selection))
    return found


def _reasons(chosen: Any) -> dict[str, Any]:
    verdicts = {
        verdict.backend: [refusal.rule for refusal in verdict.refusals]
        for verdict in chosen.verdicts
    }
    return {"reasons": verdicts, "relaxed": [term.rule for term in chosen.relaxations]}


def target_question(config: Any) -> dict[str, Any]:
    """What a layer of the target asks: vLLM's `MLAAttention` or `Attention`."""
    model = config.model_config
    if not model.use_mla:
        return {"head_size": model.get_head_size()}
    return {
        "head_size": model.get_head_size(),
        "use_mla": True,
        "use_sparse": hasattr(model.hf_config, "index_topk"),
        "num_heads": model.get_num_attention_heads(config.parallel_config),
    }


def ask(case: dict[str, Any]) -> dict[str, Any]:
    """All answers of a case."""
    from vllm.compilation.backends import set_model_tag

    from ascend_vllm_plugin import selection

    with environment(case.get("environment", {})), without(case.get("fault")):
        plain = configuration(case, speculate=False)
        selection._routes.clear()
        answers = {"alone": answer(plain, nullcontext(), target_question(plain), "target")}
        selection._routes.clear()
        # As a worker in a process of its own gets it.
        config = copy.deepcopy(configuration(case, speculate=True))
        answers["target"] = answer(config, nullcontext(), target_question(config), "target")
        question = {"head_size": 64} | case.get("question", {})
        if case.get("as_target"):
            answers["draft"] = answer(config, nullcontext(), question, "target")
        else:
            tag = set_model_tag("eagle_head")
            answers["draft"] = answer(of_the_draft(config), tag, question, "draft")
    answers["backends"] = {
        "target": _name(config.attention_config.backend),
        "draft": _name(config.speculative_config.attention_backend),
        "of the draft": _name(of_the_draft(config).attention_config.backend),
        "per kind": sorted(config.attention_config.backend_per_kind),
    }
    return answers


def _name(backend: Any) -> str | None:
    return None if backend is None else str(backend.name)


def probe(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call gives, or its error."""
    try:
        return dict(call())
    except Exception as error:  # noqa: BLE001 - whatever it raises is the result
        return {"error": f"{type(error).__name__}: {error}"}


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result = {case["name"]: probe(lambda case=case: ask(case)) for case in job["cases"]}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

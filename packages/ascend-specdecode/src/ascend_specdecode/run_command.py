"""``ascend-specdecode run``: a Hugging Face model with drafts and without, on the same prompts."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from ascend_hwprofile.report import Report, Table, write
from ascend_specdecode.adaptive.config import AdaptiveConfig
from ascend_specdecode.drafters.composite import TreeOfDrafts
from ascend_specdecode.drafters.draft_model import ModelDrafter
from ascend_specdecode.drafters.hidden_state import HiddenStateDrafter
from ascend_specdecode.drafters.lookup import PromptLookupDrafter
from ascend_specdecode.drafters.suffix import SuffixDrafter
from ascend_specdecode.errors import ArgumentError, MissingExtraError
from ascend_specdecode.observability.live import live_progress
from ascend_specdecode.observability.summary import Summary
from ascend_specdecode.orchestrator.config import EngineConfig, Mode
from ascend_specdecode.orchestrator.engine import DraftVerify
from ascend_specdecode.parameters import SamplingParameters
from ascend_specdecode.protocols import Drafter, Target
from ascend_specdecode.requests import Finished, Request

if TYPE_CHECKING:
    from ascend_specdecode.hf import LoadedModel

DRAFTERS: Final = ("ngram", "suffix", "tree", "model", "mtp")
_WARM_UP_TOKENS: Final = 4
_SHORT_SECONDS: Final = 5.0  # what other programs do in so short a time can be half of a ratio
_EXAMPLES = """\
The prompts run twice, without drafts (k = 0) and with them, after a short warm-up; the speed-up is
the ratio of the two and may be below 1. Greedy output must be the same in both.

examples:
  ascend-specdecode run MODEL_DIR --chat --prompt "What is the capital of France?"
  ascend-specdecode run MODEL_DIR --prompts prompts.txt --drafter suffix --k 6 --mode pipelined
  ascend-specdecode run MODEL_DIR --drafter tree --k 8     what ngram and suffix say, as one tree
  ascend-specdecode run GLM_DIR --drafter mtp --k 3 --prompt "The import statement"
  ascend-specdecode run MODEL_DIR --drafter model --draft-model SMALL_DIR --temperature 0.8 --seed 1
  ascend-specdecode run MODEL_DIR --trace run.json     then: ascend-specdecode report run.json

exit codes:
  0  done
  1  a request failed, or greedy output differed from that without drafts
  2  bad usage
"""
_DEFAULT_PROMPT: Final = "Repeat the following sentence three times: the sea is calm tonight."


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="a Hugging Face model, with drafts and without",
        description="Generate text with speculative decoding and say what it was worth.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="Hugging Face model folder")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt per line")
    parser.add_argument("--chat", action="store_true", help="put prompts into the chat template")
    parser.add_argument("--drafter", choices=DRAFTERS, default="ngram")
    parser.add_argument("--draft-model", type=Path, metavar="DIR", help="for --drafter model")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens (default 4)")
    parser.add_argument("--adaptive", action="store_true", help="adapt k, at most --k")
    parser.add_argument("--mode", choices=[str(mode) for mode in Mode], default=str(Mode.LOCKSTEP))
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for `report`, Chrome, Perfetto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


@attrs.frozen(eq=False)
class _Measured:
    """One pass over the prompts."""

    engine: DraftVerify[Any]
    seconds: float
    tokens: list[tuple[int, ...]]
    failures: list[str]


def _run(options: argparse.Namespace) -> int:
    prompts = _prompts(options)
    config = _config(options)
    try:
        from ascend_specdecode.hf import CachedTarget, load_model, load_target
    except ImportError as error:
        raise MissingExtraError("run", str(error.name), "hf") from error
    loaded = load_model(options.model)
    target = (
        CachedTarget(loaded.model)  # it takes trees
        if options.drafter == "tree"
        else load_target(loaded, hidden_states=options.drafter == "mtp")
    )
    make_drafter = _drafter_maker(options, loaded)
    requests = _requests(options, loaded, prompts)
    plain_config = attrs.evolve(config, num_speculative_tokens=0)
    for settings in (plain_config, config):  # warm-up
        short = [attrs.evolve(one, max_new_tokens=_WARM_UP_TOKENS) for one in requests[:1]]
        anyio.run(_measure, target, make_drafter(), settings, short, False)
    shown = sys.stdout.isatty() and not options.json
    plain = anyio.run(_measure, target, None, plain_config, requests, shown)
    drafted = anyio.run(_measure, target, make_drafter(), config, requests, shown)
    if options.trace is not None:
        _write_trace(options, plain, drafted)
    report = _report(options, loaded, prompts, plain, drafted)
    write(report, as_json=options.json)
    return report.exit_code


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.prompts is None:
        return options.prompt or [_DEFAULT_PROMPT]
    try:
        lines = options.prompts.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--prompts", f"{options.prompts}: {error}", "a text file") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise ArgumentError("--prompts", f"{options.prompts} without a line", "at least 1 prompt")
    return found


def _config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        mode=options.mode,
        num_speculative_tokens=options.k,
        adaptive=AdaptiveConfig() if options.adaptive else None,
        draft_time_limit=None,
        trace_capacity=100_000 if options.trace is not None else 0,
        seed=options.seed,
    )


def _requests(
    options: argparse.Namespace, loaded: LoadedModel, prompts: Sequence[str]
) -> list[Request]:
    sampling = SamplingParameters(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    return [
        Request(
            loaded.encode(prompt, chat=options.chat),
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            stop_tokens=loaded.stop_tokens,
        )
        for prompt in prompts
    ]


def _drafter_maker(options: argparse.Namespace, loaded: LoadedModel) -> Callable[[], Drafter]:
    """What makes a fresh drafter for each pass; weights are loaded once, here."""
    if options.drafter == "ngram":
        return PromptLookupDrafter
    if options.drafter == "suffix":
        return SuffixDrafter
    if options.drafter == "tree":
        return lambda: TreeOfDrafts(SuffixDrafter(), PromptLookupDrafter())
    from ascend_specdecode.hf import CausalDraftModel, MtpModel, load_model, load_mtp_layer

    if options.drafter == "mtp":
        layer = load_mtp_layer(loaded.folder)
        return lambda: HiddenStateDrafter(MtpModel(loaded.model, layer))
    if options.draft_model is None:
        raise ArgumentError("--draft-model", "nothing", "a model folder, for --drafter model")
    model = load_model(options.draft_model).model
    return lambda: ModelDrafter(CausalDraftModel(model))


async def _measure(
    target: Target[Any],
    drafter: Drafter | None,
    config: EngineConfig,
    requests: Sequence[Request],
    shown: bool,
) -> _Measured:
    """Run all requests together; the clock starts once the engine is open."""
    tokens: list[tuple[int, ...]] = [()] * len(requests)
    failures: list[str] = []

    async def one(index: int, request: Request) -> None:
        done = await engine.complete(request)
        tokens[index] = done.tokens
        if not isinstance(done.ending, Finished):
            failures.append(f"prompt {index}: {done.ending}")

    async with DraftVerify(target, drafter, config) as engine:
        start = time.perf_counter()
        with _progress(engine, shown=shown):
            async with anyio.create_task_group() as group:
                for index, request in enumerate(requests):
                    group.start_soon(one, index, request)
        seconds = time.perf_counter() - start
    return _Measured(engine, seconds, tokens, failures)


@contextlib.contextmanager
def _progress(engine: DraftVerify[Any], *, shown: bool) -> Iterator[None]:
    with live_progress(engine) if shown else contextlib.nullcontext():
        yield


def _write_trace(options: argparse.Namespace, plain: _Measured, drafted: _Measured) -> None:
    from ascend_specdecode.report.record import RunRecord, RunSummary, write_record

    runs = [
        RunSummary.of(name, measured.seconds, measured.engine.statistics)
        for name, measured in (("k = 0", plain), (_name(options), drafted))
    ]
    settings = {
        "model": options.model.name,
        "drafter": options.drafter,
        "k": f"{options.k}{', adaptive' if options.adaptive else ''}",
        "mode": options.mode,
        "temperature": str(options.temperature),
        "prompts": str(len(plain.tokens)),
    }
    events = drafted.engine.trace.as_chrome()["traceEvents"]
    try:
        write_record(RunRecord(settings, runs, events), options.trace)
    except OSError as error:
        raise ArgumentError("--trace", f"{options.trace}: {error.strerror}", "a file") from error


def _name(options: argparse.Namespace) -> str:
    return f"{options.drafter}, k = {options.k}"


def _report(
    options: argparse.Namespace,
    loaded: LoadedModel,
    prompts: Sequence[str],
    plain: _Measured,
    drafted: _Measured,
) -> Report:
    summary = Summary.of(
        drafted.engine.statistics,
        drafted.seconds,
        plain_tokens_per_second=plain.engine.statistics.generation_tokens / plain.seconds,
        speculation=drafted.engine.speculation(),
    )
    texts = [loaded.decode(tokens) for tokens in drafted.tokens]
    failures = plain.failures + drafted.failures
    if options.temperature == 0 and not failures and drafted.tokens != plain.tokens:
        failures.append("greedy output differs from that without drafts")
    document = {
        "texts": texts,
        "drafter": options.drafter,
        "same_as_without_drafts": drafted.tokens == plain.tokens,
        "failures": failures,
        "summary": summary.as_dict(),
    }
    shown = [f"> {prompt}\n{text}" for prompt, text in zip(prompts, texts, strict=True)]
    parts: tuple[Table | str, ...] = ("\n\n".join(shown), *summary.tables(), *failures)
    if drafted.seconds < _SHORT_SECONDS:
        parts += (f"Only {drafted.seconds:.1f} s were measured, so the speed-up is rough.",)
    return Report(document, parts, exit_code=int(bool(failures)))

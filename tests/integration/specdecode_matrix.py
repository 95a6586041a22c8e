"""Greedy output is the target's own for every drafter, mode, k and mix of requests.

    python tests/integration/specdecode_matrix.py smollm2 tiny-glm [--limit N] [--json FILE]

runs every combination that the file does not have yet, each on the real target with all prompts,
several of them in one engine with ``--share N``, and writes what it found; ``nox -s
specdecode-matrix`` does so, and ``nox -s docs -- --write`` makes docs/specdecode_matrix.md of it.
The tests run a few batches in which every request has a drafter and a k of its own; over the
batches every pair of these occurs, and every mix.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pydoc_data.topics
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import prompts as smollm2_prompts
from engines import REPOSITORY
from specdecode_drafters import Make, Router, drafters, tree_drafters
from specdecode_runs import argmax_after, eager_model

from ascend_specdecode import (
    Drafter,
    DraftVerify,
    EngineConfig,
    Finished,
    Request,
    SamplingParameters,
    Statistics,
    Target,
)
from ascend_specdecode.hf import (
    CachedTarget,
    CausalDraftModel,
    LoadedModel,
    MtpModel,
    PagedTarget,
    load_model,
    load_mtp_layer,
)

MODES: Final = ("lockstep", "pipelined")
BACKENDS: Final = ("asyncio", "trio")
LARGEST: Final = 8
_STRIDE: Final = 10
RESULTS: Final = REPOSITORY / "docs" / "specdecode_matrix.json"
_LENGTHS: Final = (5, 12, 20, 28, 40, 64)
_SAMPLED: Final = SamplingParameters(temperature=0.9, top_p=0.95)


@attrs.frozen
class Mix:
    """How the requests share their batches.

    Attributes:
        text: what it is, for people.
        settings: limits of the engine.
        crowded: whether there are places for three requests of four, and memory for half of all.
        one_by_one: whether a request comes when the one before it has its first tokens.
        sampled: sampled requests among them.
    """

    text: str
    settings: Mapping[str, int]
    crowded: bool = False
    one_by_one: bool = False
    sampled: int = 0


MIXES: Final = {
    "together": Mix("all at once", {}),
    "arriving": Mix(
        "each comes when the one before has its first tokens; prompts in parts of 32",
        {"prefill_chunk": 32, "max_num_batched_tokens": 192, "max_num_seqs": 20},
        one_by_one=True,
    ),
    "crowded": Mix(
        "three places for four requests, memory for half: some give state back and start again",
        {"max_num_batched_tokens": 256},
        crowded=True,
    ),
    "among sampled": Mix("beside three sampled requests", {}, sampled=3),
}


@attrs.frozen(eq=False)
class Subject:
    """A target with its prompts and what it says after them.

    Attributes:
        name: of the model.
        reference: the model as transformers runs it.
        make_target: makes a target without sequences.
        drafters: makers of all drafters.
        prompts: token ids.
        plain: the target's own greedy continuation of each prompt.
    """

    name: str
    reference: Any
    make_target: Callable[[], Target[Any]]
    drafters: Mapping[str, Make]
    prompts: Sequence[Sequence[int]]
    plain: Sequence[Sequence[int]]


@attrs.frozen
class Combination:
    """What is varied."""

    drafter: str
    mode: str
    k: int
    mix: str

    def __str__(self) -> str:
        return f"{self.drafter} | {self.mode} | {self.k} | {self.mix}"


@attrs.frozen(eq=False)
class Outcome:
    """What a run gave."""

    tokens: list[list[int]]
    statistics: Statistics
    leaked: bool


def settings(subject: Subject, mode: str, k: int, mix: Mix) -> EngineConfig:
    """The engine's settings for a run."""
    limits = dict(mix.settings)
    if mix.crowded:
        pairs = zip(subject.prompts, subject.plain, strict=True)
        needed = [len(prompt) + len(tokens) for prompt, tokens in pairs]
        limits |= {
            "max_num_seqs": len(needed) * 3 // 4,
            "max_cached_tokens": max(sum(needed) // 2, *needed),
        }
    return EngineConfig(
        adaptive=None,
        draft_time_limit=None,
        mode=mode,
        num_speculative_tokens=k,
        seed=0,
        **limits,
    )


def run(
    subject: Subject, drafter: Drafter | None, mode: str, k: int, mix: Mix, backend: str
) -> Outcome:
    """Decode all prompts with the real target; the seed of a request is its number."""
    found: dict[int, list[int]] = {}
    target, config = subject.make_target(), settings(subject, mode, k, mix)
    started = [anyio.Event() for _ in range(len(subject.prompts) + 1)]

    async def greedy(engine: DraftVerify[Any], row: int) -> None:
        if mix.one_by_one:
            await started[row].wait()
        found[row] = []
        greedy_at = SamplingParameters(seed=row)
        request = Request(list(subject.prompts[row]), len(subject.plain[row]), greedy_at)
        async for event in engine.generate(request):
            found[row] += getattr(event, "tokens", ())
            started[row + 1].set()
        assert isinstance(event, Finished), event

    async def sampled(engine: DraftVerify[Any], row: int) -> None:
        sampling = attrs.evolve(_SAMPLED, seed=row)
        request = Request(list(subject.prompts[row]), 16, sampling)
        assert isinstance((await engine.complete(request)).ending, Finished)

    async def main() -> Statistics:
        started[0].set()
        async with (
            DraftVerify(target, drafter, config) as engine,
            anyio.create_task_group() as group,
        ):
            for row in range(len(subject.prompts)):
                group.start_soon(greedy, engine, row)
            for row in range(mix.sampled):
                group.start_soon(sampled, engine, row)
        return engine.statistics

    statistics = anyio.run(main, backend=backend)
    held = target.sequences  # type: ignore[attr-defined]
    return Outcome([found[row] for row in range(len(found))], statistics, bool(held))


def run_combination(subject: Subject, one: Combination, backend: str) -> Outcome:
    """One drafter and one k for all prompts."""
    drafter = subject.drafters[one.drafter]()
    return run(subject, drafter, one.mode, one.k, MIXES[one.mix], backend)


def combinations(subject: Subject) -> list[Combination]:
    """All of them; first a quarter in which each drafter, mode and k has one of the mixes.

    With k = 0 there is no drafting, so that is run with one drafter. The order in a quarter is
    random, the same each time, so that the beginning of a run has something of everything.
    """
    names, mixes = list(subject.drafters), list(MIXES)
    generator, ordered = random.Random(0), []
    for shift in range(len(mixes)):
        quarter = [
            Combination(name, mode, k, mixes[(d + m + k + shift) % len(mixes)])
            for (d, name), (m, mode) in itertools.product(enumerate(names), enumerate(MODES))
            for k in range(LARGEST + 1)
            if k or not d
        ]
        generator.shuffle(quarter)
        ordered += quarter
    return ordered


def pairs_of(subject: Subject, number: int) -> list[tuple[str, int]]:
    """A drafter and a k for each prompt of batch ``number``; all pairs come up one after another.

    A batch has many drafters and many k.
    """
    pairs = list(itertools.product(subject.drafters, range(LARGEST + 1)))
    assert math.gcd(_STRIDE, len(pairs)) == 1
    count = len(subject.prompts)
    return [pairs[(number * count + row) * _STRIDE % len(pairs)] for row in range(count)]


def routed(subject: Subject, number: int) -> Router:
    """The drafter of batch ``number``, see :func:`pairs_of`."""
    made = {name: make() for name, make in subject.drafters.items()}
    pairs = enumerate(pairs_of(subject, number))
    return Router({row: (made[name], k) for row, (name, k) in pairs})


def run_batch(subject: Subject, number: int, mode: str, mix: str) -> Outcome:
    """Batch ``number``."""
    backend = BACKENDS[number % 2]
    return run(subject, routed(subject, number), mode, LARGEST, MIXES[mix], backend)


def repeated(subject: Subject, times: int) -> Subject:
    """The same with so many requests for each prompt, all prompts in turn."""
    prompts, plain = [*subject.prompts] * times, [*subject.plain] * times
    return attrs.evolve(subject, prompts=prompts, plain=plain)


def plain_tokens(
    model: Any, target: Target[Any], prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """Greedy output without drafts, which must be that of transformers' eager model."""
    subject = Subject("", model, lambda: target, {}, prompts, [[0] * count] * len(prompts))
    found = run(subject, None, "lockstep", 0, MIXES["together"], "asyncio").tokens
    for prompt, tokens in zip(prompts, found, strict=True):
        assert argmax_after(model, prompt, tokens) == tokens, "not what transformers says"
    return found


def smollm2_subject(folder: Path, num_tokens: int = 64) -> Subject:
    """SmolLM2 over our standard backend: eight prompts, two of which ask for a repetition."""
    given = _smollm2_prompts(folder)
    target = PagedTarget(load_model(folder).model, hidden_states=True)
    reference = eager_model(folder)
    plain = plain_tokens(reference, target, given, num_tokens)
    made = drafters(*_rehearsal(given, plain), target.vocabulary_size)
    return Subject("SmolLM2-135M-Instruct", reference, lambda: target, made, given, plain)


def _smollm2_prompts(folder: Path) -> list[list[int]]:
    """Six beginnings of texts, 5 to 64 tokens, and two sentences to repeat."""
    notes = smollm2_prompts.NOTES
    parts = zip((*notes, *(note[200:] for note in notes)), _LENGTHS, strict=False)
    texts = [smollm2_prompts.encode(folder, text)[:length] for text, length in parts]
    sentences = [note.partition(".")[0] + "." for note in notes[1:3]]
    asked = [smollm2_prompts.REWRITE.format(text=sentence) for sentence in sentences]
    return [*texts, *(smollm2_prompts.encode(folder, text) for text in asked)]


def tiny_glm_subject(num_tokens: int = 14) -> Subject:
    """The tiny GLM with its own MTP layer: sixteen prompts of 5 to 80 tokens; trees too."""
    folder = REPOSITORY / "assets" / "tiny_glm"
    loaded = load_model(folder)
    topics = sorted(pydoc_data.topics.topics.values())[:16]
    given = [loaded.encode(text)[: 5 + 5 * row] for row, text in enumerate(topics)]
    reference = eager_model(folder)
    plain = plain_tokens(reference, CachedTarget(loaded.model), given, num_tokens)
    known = (*_rehearsal(given, plain), loaded.model.config.vocab_size)
    makers = drafters(*known, _own_drafters(loaded)) | tree_drafters(*known)
    return Subject(
        "tiny GLM",
        reference,
        lambda: CachedTarget(loaded.model, hidden_states=True),
        makers,
        given,
        plain,
    )


def _rehearsal(
    given: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[int]]:
    pairs = zip(given, plain, strict=True)
    return [[*prompt, *tokens] for prompt, tokens in pairs], [len(prompt) for prompt in given]


def _own_drafters(loaded: LoadedModel) -> dict[str, Make]:
    """The MTP layer of the checkpoint, and the model as its own draft model."""
    from ascend_specdecode import HiddenStateDrafter, ModelDrafter

    layer = load_mtp_layer(loaded.folder)
    return {
        "hidden states": lambda: HiddenStateDrafter(MtpModel(loaded.model, layer)),
        "model": lambda: ModelDrafter(CausalDraftModel(loaded.model)),
    }


def _smollm2_folder() -> Path:
    sys.path.insert(0, str(REPOSITORY / "tools"))
    from ascend_demo.model import make_model

    return make_model().path


SUBJECTS: Final[Mapping[str, Callable[[], Subject]]] = {
    "smollm2": lambda: smollm2_subject(_smollm2_folder()),
    "tiny-glm": tiny_glm_subject,
}


def measure(
    subject: Subject, done: Mapping[str, Any], share: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run what is not done yet, up to ``share`` at a time; for each combination what it gave."""
    left = [one for one in combinations(subject) if str(one) not in done]
    for number, pack in enumerate(packs(left, share)):
        start = time.perf_counter()
        outcome = run_pack(subject, pack, BACKENDS[number % 2])
        counted = outcome.statistics
        engine = {
            "combinations_in_engine": len(pack),
            "steps": counted.steps,
            "acceptance_length": round(counted.acceptance_length, 3),
            "draft_errors": counted.draft_errors,
            "preemptions": counted.preemptions,
            "seconds": round((time.perf_counter() - start) / len(pack), 1),
        }
        for place, one in enumerate(pack):
            own = outcome.tokens[place * len(subject.plain) :][: len(subject.plain)]
            equal = own == list(map(list, subject.plain)) and not outcome.leaked
            yield str(one), {"equal": equal, **engine}


def packs(left: Sequence[Combination], share: int) -> Iterator[Sequence[Combination]]:
    """Combinations in their order, those of one mode and mix together where several share."""
    groups: dict[object, list[Combination]] = {}
    for one in left:
        groups.setdefault((one.mode, one.mix) if share > 1 else one, []).append(one)
    for group in groups.values():
        for first in range(0, len(group), share):
            yield group[first : first + share]


def run_pack(subject: Subject, pack: Sequence[Combination], backend: str) -> Outcome:
    """Combinations of one mode and mix in one engine, the prompts of each in turn.

    Alone, a combination has the engine's own drafter and k; beside others every request has those
    of its combination. The target is the same for all, so it scores large batches.
    """
    first, *others = pack
    if not others:
        return run_combination(subject, first, backend)
    made = {name: make() for name, make in subject.drafters.items()}
    count = len(subject.prompts)
    owners = [(made[one.drafter], one.k) for one in pack for _ in range(count)]
    many = repeated(subject, len(pack))
    router = Router(dict(enumerate(owners)))
    return run(many, router, first.mode, LARGEST, MIXES[first.mix], backend)


def as_lines(results: Mapping[str, Any]) -> str:
    """JSON with one run a line."""
    text = json.dumps(results, sort_keys=True)
    return re.sub(r'("[^"|]+\|[^"]+": )', r"\n\1", text) + "\n"


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: the session may be ended at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)


def main() -> int:
    """Run combinations and keep the results; exit code 1 where output differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("subjects", nargs="+", choices=list(SUBJECTS))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="combinations of a mode and mix that share an engine; many are faster (default 1)",
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of results")
    options = parser.parse_args()
    results = json.loads(options.json.read_text("utf-8")) if options.json.is_file() else {}
    end = time.monotonic() + options.limit
    for name in options.subjects:
        subject = SUBJECTS[name]()
        found = results.setdefault(subject.name, {"combinations": len(combinations(subject))})
        found |= {"prompts": len(subject.prompts), "tokens": len(subject.plain[0])}
        done = found.setdefault("runs", {})
        for text, outcome in measure(subject, done, options.share):
            done[text] = outcome
            print(f"{len(done)} of {found['combinations']}  {text}  {outcome}", flush=True)
            replace_text(options.json, as_lines(results))
            if time.monotonic() > end:
                break
    return int(not all(run["equal"] for one in results.values() for run in one["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())

"""Tokens per second in real vLLM 0.30: ``python bench_vllm_tokens.py [--json FILE]``.

Our backends in simulate mode against vLLM's own for CPUs, in float32 and eager mode, with the same
model and prompts of 32 tokens. Each side is an engine in a process of its own; they take turns of
eight decoding steps until both have the same 128 tokens of every request. A second is one of the
processor: either side has one thread that never waits, so on an idle machine it is one of the
clock, and on a busy one it does not count what others do. Blocks of the cache have the size that
each side chooses itself: 128 tokens, and 16 for CPU_MLA.

* standard, SmolLM2-135M: against CPU_ATTN, whose decode is a C++ kernel
* mla, a DeepSeek-V3 of two layers with random weights: against CPU_MLA, likewise. On both sides
  queries are rotated by the plugin's patch, without which vLLM gives other tokens than transformers

Nothing here is a claim about an NPU.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
from ratios import Ratio, options, report
from vllm_engine import Engine, Prompts

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "integration")]

BATCHES = (1, 8)
PROMPT, TOKENS, STEPS = 32, 128, 8
TURNS = TOKENS // STEPS  # the first one warms up


@attrs.frozen
class Comparison:
    """One model and what its layers must be on either side."""

    label: str
    model: Path
    prompts: Prompts
    ours: str
    stock: str


def smollm2() -> Comparison:
    """SmolLM2 with eight prompts of English, made by the repository's tool unless it is there."""
    import prompts
    from ascend_demo.model import make_model

    model = make_model().path
    ids = [prompts.encode(model, note) for note in prompts.NOTES]
    rows = [note[first : first + PROMPT] for first in (0, PROMPT) for note in ids]
    return Comparison("SmolLM2-135M", model, rows, "StandardBackend", "CPUAttentionBackend")


def tiny_mla(folder: Path) -> Comparison:
    """The tiny DeepSeek-V3 of the tests with eight random prompts."""
    import latent_models

    model = latent_models.make_deepseek_v3(folder)
    numbers = random.Random(0)
    rows = [
        [numbers.randrange(3, latent_models.VOCABULARY) for _ in range(PROMPT)] for _ in "8" * 8
    ]
    return Comparison("tiny DeepSeek-V3", model, rows, "MLABackend", "CPUMLABackend")


def ratios(comparison: Comparison) -> Iterator[Ratio]:
    """Tokens per second of our side in times of the other, for each batch size."""
    with ExitStack() as stack:
        sides = {}
        for name, simulate in (("ours", True), ("stock", False)):
            sides[name] = Engine.started(name, comparison.model, simulate=simulate)
            stack.callback(sides[name].stop)
        for name, side in sides.items():
            expected = getattr(comparison, name)
            if set(side.layers) != {expected}:
                raise SystemExit(f"{name}: layers are {side.layers}, expected {expected} only")
        for batch in BATCHES:
            yield ratio(comparison, sides, batch)


def ratio(comparison: Comparison, sides: dict[str, Engine], batch: int) -> Ratio:
    """One batch size: the same prompts on both sides, then decoding in turns."""
    for side in sides.values():
        side.prefill(comparison.prompts[:batch], TOKENS + 1)
    turns = [{name: side.decode(STEPS) for name, side in sides.items()} for _ in range(TURNS)]
    ours, stock = (side.tokens() for side in sides.values())
    if ours != stock or {len(row) for row in ours} != {TOKENS + 1}:
        raise SystemExit(f"{comparison.label}, batch {batch}: tokens differ: {ours} and {stock}")
    found = {name: statistics.median(turn[name] for turn in turns[1:]) for name in sides}
    rates = {f"{name} tokens/s": batch * STEPS / seconds for name, seconds in found.items()}
    against = comparison.stock.removesuffix("Backend")
    name = f"decode, {comparison.label}, batch {batch}, tokens per second: ours / {against}"
    return Ratio(name, found["stock"] / found["ours"], ">= 0.9", rates)


def measure() -> Iterator[Ratio]:
    """All ratios."""
    yield from ratios(smollm2())
    with tempfile.TemporaryDirectory() as folder:
        yield from ratios(tiny_mla(Path(folder) / "deepseek"))


def main() -> int:
    return report(measure(), options(__doc__).parse_args().json)


if __name__ == "__main__":
    sys.exit(main())

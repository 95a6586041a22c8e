"""Rejection sampling and look-up drafters: ``python bench_specdecode_sampling.py [--json FILE]``.

Rejection sampling of 256 requests, k = 4, 32,000 tokens, against vLLM 0.30's own on its CPU path
(its functions with the C++ kernels that it has for CPUs), in one process, in turns, on one CPU
thread. Before anything is timed both sides get the same uniforms and must emit the same tokens.

* from probabilities: both draw their random numbers, accept and recover; ours also checks its input
* from logits: the same with each side's softmax; ours of the places that decide something
* numbers given: both only accept and recover, with the same noise

Drafters that look a context up: a step (one token learned, four proposed) at 131,072 tokens of
context against 8,192, and learning a token; and the plain scan of the context against the index.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import anyio
import attrs
import numpy as np
import torch
from ratios import Ratio, medians, options, report

from ascend_specdecode import (
    ExponentialRace,
    PromptLookupDrafter,
    SequenceState,
    SuffixDrafter,
    find_ngram,
    rejection_sample,
    rejection_sample_logits,
    rejection_sample_with,
)

BATCH, K, VOCABULARY = 256, 4, 32_000
SHORT, LONG, STEPS = 8_192, 131_072, 1_000
KERNELS = {
    "_rejection_random_sample": "rejection_random_sample_kernel",
    "_sample_recovered_tokens": "sample_recovered_tokens_kernel",
}


class Launchable:
    """A C++ kernel as vLLM's dispatchers want one."""

    def __init__(self, wrapper: Any) -> None:
        self.func = wrapper.func

    def __getitem__(self, grid: object) -> Any:
        return self.func


def vllm_on_cpu() -> Any:
    """vLLM's module of rejection sampling, its CPU kernels behind its dispatchers."""
    os.environ.setdefault("VLLM_PLUGINS", "")
    sampler = import_module("vllm.v1.sample.rejection_sampler")
    kernels = import_module("vllm.utils.cpu_triton_utils")
    for name, kernel in KERNELS.items():
        getattr(sampler, name).kernel = Launchable(getattr(kernels, kernel))
    return sampler


@attrs.frozen(eq=False)
class Step:
    """One step: logits ``[B, K+1, V]``, distributions of target and drafter, drafted tokens."""

    logits: torch.Tensor
    target: torch.Tensor
    drafter: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def random(cls) -> Step:
        logits = 2 * torch.randn(BATCH, K + 1, VOCABULARY)
        drafter = (logits[:, :K] + torch.randn(BATCH, K, VOCABULARY)).softmax(-1)
        tokens = drafter.flatten(0, 1).multinomial(1).reshape(BATCH, K)
        return cls(logits, logits.softmax(-1), drafter, tokens)


class Vllm:
    """vLLM's rejection sampling of a step: its own functions, with its flat tensors."""

    def __init__(self, step: Step) -> None:
        self.sampler = vllm_on_cpu()
        self.logits = step.logits[:, :K].flatten(0, 1).contiguous()
        self.target = step.target[:, :K].flatten(0, 1).contiguous()
        self.drafter = step.drafter.flatten(0, 1).contiguous()
        self.tokens = step.tokens.flatten().int()
        self.ends = (torch.arange(BATCH) + 1).int() * K
        self.bonus = torch.zeros(BATCH, 1, dtype=torch.int32)
        metadata_class = import_module("vllm.v1.sample.metadata").SamplingMetadata
        self.metadata = metadata_class.__new__(metadata_class)
        self.metadata.all_greedy, self.metadata.all_random = False, True
        self.metadata.temperature, self.metadata.generators = torch.ones(BATCH), {}

    def from_logits(self) -> torch.Tensor:
        return self.sampler.rejection_sample(
            self.tokens,
            [K] * BATCH,
            K,
            self.ends,
            self.drafter,
            self.logits,
            self.bonus,
            self.metadata,
        )

    def from_probabilities(self) -> torch.Tensor:
        """What that function does after its softmax."""
        counts = [K] * BATCH
        uniforms = self.sampler.generate_uniform_probs(BATCH * K, counts, {}, self.target.device)
        recovered = self.sampler.sample_recovered_tokens(
            K, counts, self.ends, self.tokens, self.drafter, self.target, self.metadata,
            self.target.device,
        )  # fmt: skip
        return self.accept(recovered, uniforms)

    def with_numbers(self, uniforms: torch.Tensor, inverse_noise: torch.Tensor) -> torch.Tensor:
        recovered = torch.empty_like(self.tokens)
        self.sampler._sample_recovered_tokens(
            recovered, self.ends, self.tokens, self.drafter, self.target, inverse_noise,
            max_spec_len=K,
        )  # fmt: skip
        return self.accept(recovered, uniforms)

    def accept(self, recovered: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        emitted = torch.full((BATCH, K + 1), -1, dtype=torch.int32)
        self.sampler._rejection_random_sample(
            emitted,
            self.ends,
            self.tokens,
            self.drafter,
            self.target,
            self.bonus,
            recovered,
            uniforms,
            torch.zeros(BATCH, dtype=torch.bool),
            K,
            None,
        )
        return emitted


def ours_with_numbers(
    step: Step, uniforms: torch.Tensor, inverse_noise: torch.Tensor
) -> torch.Tensor:
    counts = torch.full((BATCH,), K)
    race = ExponentialRace(inverse_noise)
    return rejection_sample_with(
        step.tokens, step.target, step.drafter, counts, uniforms.reshape(BATCH, K).float(), race
    )


def assert_same_tokens(
    step: Step, vllm: Vllm, uniforms: torch.Tensor, inverse_noise: torch.Tensor
) -> None:
    """Both sides emit the same tokens from the same numbers; vLLM is given its bonus tokens."""
    bonus = (step.target[:, K] * inverse_noise).argmax(-1, keepdim=True)
    vllm.bonus.copy_(bonus)
    theirs = vllm.with_numbers(uniforms, inverse_noise)
    ours = ours_with_numbers(step, uniforms, inverse_noise)
    if not torch.equal(ours, theirs.long()):
        raise SystemExit("same uniforms, but not the tokens that vLLM emits")


def sampling_ratios() -> Iterator[Ratio]:
    if find_spec("vllm") is None:
        print("no comparison with vLLM: it is not installed here", file=sys.stderr)
        return
    step = Step.random()
    vllm = Vllm(step)
    uniforms = torch.rand(BATCH * K, dtype=torch.float64)
    inverse_noise = torch.empty(BATCH, VOCABULARY).exponential_().reciprocal()
    assert_same_tokens(step, vllm, uniforms, inverse_noise)
    seeds = torch.arange(BATCH)

    def ours() -> torch.Tensor:
        return rejection_sample(step.tokens, step.target, step.drafter, seeds=seeds)

    def ours_from_logits() -> torch.Tensor:
        return rejection_sample_logits(step.tokens, step.logits, step.drafter, seeds=seeds)

    if not torch.equal(ours(), ours_from_logits()):
        raise SystemExit("other tokens from logits than from their softmax")

    label = f"rejection sampling, {BATCH} requests, k = {K}, {VOCABULARY:,} tokens"
    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
        "from probabilities": (vllm.from_probabilities, ours, ">= 5"),
        "from logits": (vllm.from_logits, ours_from_logits, ">= 4"),
        "numbers given": (
            lambda: vllm.with_numbers(uniforms, inverse_noise),
            lambda: ours_with_numbers(step, uniforms, inverse_noise),
            ">= 1",
        ),
    }
    for name, (theirs, own, goal) in sides.items():
        found = medians({"vLLM ms": theirs, "ours ms": own}, 9)
        ratio = found["vLLM ms"] / found["ours ms"]
        yield Ratio(f"{label}, {name}: vLLM / ours", ratio, goal, found)


def text(length: int) -> np.ndarray:
    """Tokens with the frequencies of words, and passages that are said again."""
    generator = np.random.default_rng(0)
    tokens = np.minimum(generator.zipf(1.3, length + STEPS), VOCABULARY - 1)
    for start in range(2_000, length, 4_000):
        said = int(generator.integers(0, start - 500))
        tokens[start : start + 500] = tokens[said : said + 500]
    return tokens.astype(np.int64)


class Steps:
    """A sequence of ``length`` tokens that a drafter knows, and its next steps."""

    def __init__(self, make: Callable[[], Any], length: int) -> None:
        self.make, self.length = make, length
        self.tokens = text(length)
        self.drafter: Any = None
        self.state = SequenceState.of(self.tokens[:length])

    def learn(self) -> None:
        """Learn the context from nothing."""
        self.drafter = self.make()
        self.state = SequenceState.of(self.tokens[: self.length])
        anyio.run(self.drafter.propose, [self.state], K)

    def go_on(self) -> None:
        """Take ``STEPS`` steps of one token; the context grows by as many."""
        anyio.run(self._go_on)

    async def _go_on(self) -> None:
        state = self.state
        for token in self.tokens[self.length :]:
            state.origin.buffer.append([int(token)])
            state = SequenceState(state.origin, state.length + 1)
            await self.drafter.propose([state], K)
        self.state = state


def drafter_ratios() -> Iterator[Ratio]:
    drafters: dict[str, Callable[[], Any]] = {
        "n-gram": lambda: PromptLookupDrafter(1, 3),
        "suffix": SuffixDrafter,
    }
    for name, make in drafters.items():
        short, long = Steps(make, SHORT), Steps(make, LONG)
        learned = medians({"short": short.learn, "long": long.learn}, 3)
        per_token = {
            "8k us": 1e3 * learned["short"] / SHORT,
            "128k us": 1e3 * learned["long"] / LONG,
        }
        # Tables that no longer fit the cache cost more per look-up, whoever keeps them.
        yield flat(f"{name} drafter, learning a token: 128k / 8k of context", per_token, "<= 2.5")
        stepped = medians({"8k us": short.go_on, "128k us": long.go_on}, 5)
        per_step = {key: 1e3 * value / STEPS for key, value in stepped.items()}
        yield flat(f"{name} drafter, a step: 128k / 8k of context", per_step, "<= 1.5")
    yield scan_ratio()


def flat(name: str, found: dict[str, float], goal: str) -> Ratio:
    return Ratio(name, found["128k us"] / found["8k us"], goal, found)


def scan_ratio() -> Ratio:
    tokens = text(LONG)
    steps = Steps(lambda: PromptLookupDrafter(1, 3), LONG)
    steps.learn()

    def scan() -> None:
        for end in range(LONG, LONG + 100):
            find_ngram(tokens[:end], 1, 3)

    found = medians({"scan ms": scan, "index ms": steps.go_on}, 3)
    found = {"scan us": 1e3 * found["scan ms"] / 100, "index us": 1e3 * found["index ms"] / STEPS}
    ratio = found["scan us"] / found["index us"]
    return Ratio("n-gram at 128k of context: scan / index", ratio, ">= 1", found)


def measure() -> Iterator[Ratio]:
    """All ratios."""
    yield from drafter_ratios()
    yield from sampling_ratios()


def main() -> int:
    parsed = options(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        return report(measure(), parsed.json)


if __name__ == "__main__":
    sys.exit(main())

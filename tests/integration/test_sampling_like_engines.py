"""ascend-specdecode samples as vLLM and transformers do: same definitions, same uniforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
import vllm.utils.cpu_triton_utils as cpu_kernels
from transformers.generation import logits_process
from vllm.v1.sample import rejection_sampler as vllm_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler as VllmSampler

from ascend_specdecode import (
    DraftedSequence,
    ExponentialRace,
    InverseCdf,
    LogitsSampler,
    Proposal,
    SamplingParameters,
    SequenceState,
    apply_top_k,
    apply_top_p,
    rejection_sample_with,
)
from ascend_vllm_plugin.patches.kernel_dispatchers import LaunchableFunction

VOCABULARY = 97
PROMPT, OUTPUT = [3, 5, 5, 11], [7, 3, 7, 20]

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.4},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.93},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 0.7, "repetition_penalty": 0.8, "top_k": 30, "top_p": 0.9},
]
PENALTIES = [
    {"temperature": 1.0, "presence_penalty": 1.2},
    {"temperature": 1.0, "frequency_penalty": 0.6},
    {"temperature": 0.9, "presence_penalty": -0.4, "frequency_penalty": 1.1, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 40},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 60: -2.5}, "repetition_penalty": 1.5},
]


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ours(logits: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    state = SequenceState.of([*PROMPT, *OUTPUT], 0, parameters, prompt_length=len(PROMPT))
    batch = [DraftedSequence(state)] * len(logits)
    return LogitsSampler().probabilities(batch, logits.unsqueeze(1))[:, 0]


def transformers_way(logits: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    steps: list[Any] = [
        logits_process.RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty),
        logits_process.TemperatureLogitsWarper(parameters.temperature),
    ]
    if parameters.top_k:
        steps.append(logits_process.TopKLogitsWarper(parameters.top_k))
    if parameters.top_p < 1:
        steps.append(logits_process.TopPLogitsWarper(parameters.top_p))
    ids = torch.tensor([[*PROMPT, *OUTPUT]]).expand(len(logits), -1)
    for step in steps:
        logits = step(ids, logits)
    return logits.softmax(-1)


def vllm_way(logits: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    rows, logits = len(logits), logits.clone()
    for token, bias in parameters.logit_bias.items():
        logits[:, token] += bias
    one = torch.ones(rows)
    logits = apply_all_penalties(
        logits,
        torch.tensor([PROMPT]).expand(rows, -1),
        one * parameters.presence_penalty,
        one * parameters.frequency_penalty,
        one * parameters.repetition_penalty,
        [OUTPUT] * rows,
    )
    logits = VllmSampler.apply_temperature(logits, one * parameters.temperature, True)
    top_k = torch.full((rows,), parameters.top_k or VOCABULARY)
    logits = apply_top_k_top_p_pytorch(logits, top_k, one * parameters.top_p)
    return logits.softmax(-1)


def assert_same_distribution(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_distributions_are_those_of_transformers(settings: dict[str, Any]) -> None:
    logits, parameters = random_logits(0, 20, VOCABULARY), SamplingParameters(**settings)
    assert_same_distribution(ours(logits, parameters), transformers_way(logits, parameters))


@pytest.mark.parametrize("settings", SETTINGS + PENALTIES, ids=str)
def test_distributions_are_those_of_vllm(settings: dict[str, Any]) -> None:
    logits, parameters = random_logits(1, 20, VOCABULARY), SamplingParameters(**settings)
    assert_same_distribution(ours(logits, parameters), vllm_way(logits, parameters))


def test_another_order_of_the_steps_is_told_apart() -> None:
    """Top-p before top-k keeps other tokens, and the comparison sees it."""
    logits = random_logits(2, 20, VOCABULARY)
    parameters = SamplingParameters(temperature=1.0, top_k=4, top_p=0.6)
    swapped = apply_top_k(apply_top_p(logits.unsqueeze(1), [0.6] * 20), [4] * 20)
    with pytest.raises(AssertionError):
        assert_same_distribution(swapped.softmax(-1)[:, 0], vllm_way(logits, parameters))


def test_of_equal_logits_at_the_border_as_many_are_cut_as_in_vllm() -> None:
    """Which of them is up to an unstable sort in vLLM; how many is not."""
    logits = random_logits(3, 50, VOCABULARY).round()  # many equals
    for settings in ({"top_p": 0.7}, {"top_k": 6}, {"top_k": 9, "top_p": 0.8}):
        parameters = SamplingParameters(temperature=1.0, **settings)
        found, expected = ours(logits, parameters), vllm_way(logits, parameters)
        assert_same_distribution(found.sort(-1).values, expected.sort(-1).values)


KERNELS = {
    "_rejection_random_sample": "_rejection_random_sample_kernel_impl",
    "_sample_recovered_tokens": "_sample_recovered_tokens_kernel_impl",
}


@pytest.fixture
def vllm_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's own C++ kernels behind its dispatchers, as its set-up for CPUs intends."""
    dispatchers = [getattr(vllm_sampler, name) for name in KERNELS]
    for dispatcher, kernel in zip(dispatchers, KERNELS.values(), strict=True):
        monkeypatch.setattr(dispatcher, "kernel", LaunchableFunction(getattr(cpu_kernels, kernel)))
        vars(dispatcher).pop("_kernel_arg_names", None)
    yield
    for dispatcher in dispatchers:
        vars(dispatcher).pop("_kernel_arg_names", None)


@attrs.frozen(eq=False)
class Step:
    """A padded step: tokens [B, K], logits [B, K+1, V], draft_probs [B, K, V], counts [B]."""

    tokens: torch.Tensor
    logits: torch.Tensor
    draft_probs: torch.Tensor | None
    counts: torch.Tensor

    @classmethod
    def random(cls, seed: int, batch: int, k: int, vocabulary: int, with_probs: bool) -> Step:
        generator = torch.Generator().manual_seed(seed)
        logits = random_logits(seed, batch, k + 1, vocabulary)
        probs = (logits[:, :k] + random_logits(seed + 1, batch, k, vocabulary) / 3).softmax(-1)
        tokens = probs.flatten(0, 1).multinomial(1, generator=generator).reshape(batch, k)
        counts = torch.randint(0, k + 1, (batch,), generator=generator)
        return cls(tokens, logits, probs if with_probs else None, counts)

    @property
    def drafted(self) -> torch.Tensor:
        """Which places hold a drafted token: [B, K] bool."""
        return torch.arange(self.tokens.shape[1]) < self.counts.unsqueeze(1)


def draw(step: Step, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that vLLM draws after ``torch.manual_seed(seed)``: uniforms, inverse noise."""
    torch.manual_seed(seed)
    flat = torch.rand(int(step.counts.sum()), dtype=torch.float64)
    noise = torch.empty(len(step.counts), step.logits.shape[-1]).exponential_()
    uniforms = torch.zeros(step.tokens.shape)
    uniforms[step.drafted] = flat.float()  # vLLM's CPU kernel compares in float32
    return uniforms, noise.reciprocal()


def vllm_tokens(step: Step, seed: int, bonus: torch.Tensor) -> list[list[int]]:
    """What vLLM's ``rejection_sample`` returns after ``torch.manual_seed(seed)``."""
    drafted, probs = step.drafted, step.draft_probs
    metadata = SamplingMetadata.__new__(SamplingMetadata)
    metadata.all_greedy, metadata.all_random, metadata.generators = False, True, {}
    metadata.temperature = torch.ones(len(step.counts))
    torch.manual_seed(seed)
    tokens = vllm_sampler.rejection_sample(
        step.tokens[drafted].int(),
        step.counts.tolist(),
        step.tokens.shape[1],
        step.counts.cumsum(0).int(),
        None if probs is None else probs[drafted].contiguous(),
        step.logits[:, :-1][drafted].contiguous(),
        bonus.unsqueeze(1).int(),
        metadata,
    )
    return [list(row) for row in tokens.tolist()]


def our_tokens(step: Step, seed: int) -> torch.Tensor:
    uniforms, inverse_noise = draw(step, seed)
    return rejection_sample_with(
        step.tokens,
        step.logits.softmax(-1),
        step.draft_probs,
        step.counts,
        uniforms,
        ExponentialRace(inverse_noise),
    )


def bonus_tokens(step: Step, seed: int) -> torch.Tensor:
    """vLLM is given its bonus tokens; they race with the same noise."""
    rows = torch.arange(len(step.counts))
    return (step.logits.softmax(-1)[rows, step.counts] * draw(step, seed)[1]).argmax(-1)


@pytest.mark.usefixtures("vllm_on_cpu")
@pytest.mark.parametrize("with_probs", [True, False], ids=["draft-probs", "point-mass"])
@pytest.mark.parametrize("shape", [(64, 5, 13), (200, 3, 4), (3, 1, 1), (24, 4, 32_000)], ids=str)
def test_same_uniforms_give_the_tokens_of_vllms_rejection_sampler(
    shape: tuple[int, int, int], with_probs: bool
) -> None:
    for seed in range(4):
        step = Step.random(seed, *shape, with_probs)
        expected = vllm_tokens(step, seed, bonus_tokens(step, seed))
        assert our_tokens(step, seed).tolist() == expected


@pytest.mark.usefixtures("vllm_on_cpu")
def test_other_uniforms_are_told_apart() -> None:
    step = Step.random(0, 64, 5, 13, True)
    assert our_tokens(step, 1).tolist() != vllm_tokens(step, 0, bonus_tokens(step, 0))


@pytest.mark.usefixtures("vllm_on_cpu")
def test_where_vllm_emits_an_impossible_token_we_do_not() -> None:
    """Nothing is left of a residual but rounding: see ascend-specdecode's own test."""
    row = torch.tensor([0.0, 0.0, 1 - 2.0**-24])
    recovered = torch.empty(1, dtype=torch.int32)
    vllm_sampler._sample_recovered_tokens(
        recovered,
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([[0.0, 0.0, 1.0]]),
        row.unsqueeze(0),
        torch.ones(1, 3),
        max_spec_len=1,
    )
    assert recovered.tolist() == [0]
    found = rejection_sample_with(
        torch.tensor([[2]]),
        row.expand(1, 2, 3),
        torch.tensor([[[0.0, 0.0, 1.0]]]),
        torch.tensor([1]),
        torch.tensor([[1 - 2.0**-25]]).double(),
        InverseCdf(torch.zeros(1, 2).double()),
    )
    assert found.tolist() == [[2, -1]]


def test_places_of_a_draft_have_the_penalties_of_plain_decoding() -> None:
    """Scoring k drafted tokens at once gives what k + 1 single steps would give."""
    parameters = SamplingParameters(
        temperature=0.9, frequency_penalty=0.7, repetition_penalty=1.2, logit_bias={5: 1.0}
    )
    drafted, logits = (9, 9, 3), random_logits(4, 4, VOCABULARY)
    tokens = [*PROMPT, *OUTPUT]
    state = SequenceState.of(tokens, 0, parameters, prompt_length=len(PROMPT))
    together = LogitsSampler().probabilities(
        [DraftedSequence(state, Proposal(drafted))], logits.unsqueeze(0)
    )[0]
    for place in range(4):
        output = [*OUTPUT, *drafted[:place]]
        alone = logits[[place]].clone()
        alone[:, 5] += 1.0
        alone = apply_all_penalties(
            alone,
            torch.tensor([PROMPT]),
            torch.zeros(1),
            torch.tensor([0.7]),
            torch.tensor([1.2]),
            [output],
        )
        expected = (alone / 0.9).softmax(-1)
        assert_same_distribution(together[[place]], expected)

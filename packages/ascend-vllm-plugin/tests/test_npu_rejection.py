"""The torch kernels that verify drafts on an NPU, against loops over requests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_vllm_plugin.patches import NPU_PATCHES
from ascend_vllm_plugin.patches.npu_rejection import greedy, random, recovered

VOCABULARY, WIDTH, EMPTY = 5, 3, -9

requests = st.lists(st.integers(0, WIDTH), min_size=1, max_size=5).filter(any)
seeds = st.integers(0, 2**31)


class Batch:
    """Requests with so many drafts each, and numbers drawn with a seed."""

    def __init__(self, counts, seed, *, padding=True):
        self.counts = counts
        generator = torch.Generator().manual_seed(seed)
        total, size = sum(counts), len(counts)

        def tokens(low, *shape):
            return torch.randint(low, VOCABULARY, shape, generator=generator)

        def numbers(*shape):
            return torch.rand(shape, generator=generator, dtype=torch.float64)

        self.ends = torch.tensor(counts).cumsum(0).int()
        self.drafts = tokens(-1 if padding else 0, total).int()
        self.argmax = tokens(0, total)
        self.bonus = tokens(0, size, 1).int()
        self.recovered = tokens(0, total).int()
        self.target = numbers(total, VOCABULARY).float().softmax(1)
        self.draft = numbers(total, VOCABULARY).float().round()  # with zeros
        self.draft /= self.draft.sum(1, keepdim=True).clamp(min=1)
        self.uniform = numbers(total)
        self.noise = numbers(size, VOCABULARY).reciprocal()
        self.rates = numbers(WIDTH).float()
        self.is_greedy = tokens(0, size) < 2

    def empty(self):
        return torch.full((len(self.counts), WIDTH + 1), EMPTY, dtype=torch.int32)

    def walk(self, judge, rows):
        """Request by request, place by place: `judge(place, column)` -> token, accepted."""
        output, place = self.empty().tolist(), 0
        for row, count in enumerate(self.counts):
            alive = bool(rows[row])
            for column in range(count):
                if alive:
                    output[row][column], alive = judge(place, column)
                place += 1
            if alive:
                output[row][count] = int(self.bonus[row])
        return output


@given(counts=requests, seed=seeds, everybody=st.booleans())
def test_greedy(counts, seed, everybody):
    batch = Batch(counts, seed)
    rows = None if everybody else batch.is_greedy
    output = batch.empty()
    greedy(output, batch.ends, batch.drafts, batch.argmax, batch.bonus, rows, WIDTH, None, None,
           SYNTHETIC_MODE=False)  # fmt: skip

    def judge(place, column):
        token = int(batch.argmax[place])
        return token, token == int(batch.drafts[place])

    assert output.tolist() == batch.walk(judge, [True] * len(counts) if everybody else rows)


@given(counts=requests, seed=seeds)
def test_greedy_with_rates_that_a_measurement_asks_for(counts, seed):
    batch = Batch(counts, seed)
    output = batch.empty()
    greedy(output, batch.ends, batch.drafts, batch.argmax, batch.bonus, None, WIDTH,
           batch.uniform, batch.rates, SYNTHETIC_MODE=True)  # fmt: skip

    def judge(place, column):
        draft = int(batch.drafts[place])
        accepted = bool(batch.uniform[place] < batch.rates[column]) and draft >= 0
        return draft if accepted else int(batch.argmax[place]), accepted

    assert output.tolist() == batch.walk(judge, [True] * len(counts))


@given(counts=requests, seed=seeds, sure=st.booleans(), rates=st.booleans())
def test_random(counts, seed, sure, rates):
    batch = Batch(counts, seed)
    output = batch.empty()
    random(output, batch.ends, batch.drafts, None if sure else batch.draft, batch.target,
           batch.bonus, batch.recovered, batch.uniform, batch.is_greedy, WIDTH, VOCABULARY,
           batch.rates if rates else None, NO_DRAFT_PROBS=sure, SYNTHETIC_MODE=rates)  # fmt: skip

    def judge(place, column):
        draft = int(batch.drafts[place])
        if draft < 0:
            accepted = False
        elif rates:
            accepted = bool(batch.uniform[place] < batch.rates[column])
        else:
            chance = 1.0 if sure else float(batch.draft[place, draft])
            accepted = chance > 0 and float(batch.target[place, draft]) / chance >= float(
                batch.uniform[place]
            )
        return draft if accepted else int(batch.recovered[place]), accepted

    assert output.tolist() == batch.walk(judge, ~batch.is_greedy)


@given(counts=requests, seed=seeds, sure=st.booleans())
def test_recovered(counts, seed, sure):
    batch = Batch(counts, seed)
    output = torch.full((sum(counts),), EMPTY, dtype=torch.int32)
    recovered(output, batch.ends, batch.drafts, None if sure else batch.draft, batch.target,
              batch.noise, VOCABULARY, BLOCK_SIZE=8, NO_DRAFT_PROBS=sure,
              USE_FP64_GUMBEL=True)  # fmt: skip
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    for place, row in enumerate(rows):
        scores = []
        for token in range(VOCABULARY):
            left = float(batch.target[place, token])
            if sure:
                left = 0.0 if token == int(batch.drafts[place]) else left
            else:
                left = max(left - float(batch.draft[place, token]), 0.0)
            scores.append(left * float(batch.noise[row, token]))
        assert scores[int(output[place])] == pytest.approx(max(scores), rel=1e-6)


def test_accepted_and_recovered_tokens_have_the_target_s_distribution():
    """20000 requests with one draft each from another distribution; chi-square, 4 degrees."""
    size = 20_000
    target = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    draft = torch.tensor([0.3, 0.1, 0.3, 0.1, 0.2])
    torch.manual_seed(5)
    drafts = torch.multinomial(draft, size, replacement=True).int()
    ends = torch.arange(1, size + 1).int()
    noise = torch.empty(size, VOCABULARY, dtype=torch.float64).exponential_().reciprocal()
    rows = (draft.expand(size, -1), target.expand(size, -1))
    others = torch.empty(size, dtype=torch.int32)
    recovered(others, ends, drafts, *rows, noise, VOCABULARY, 8, False, True)

    def first(instead):
        output = torch.full((size, 2), EMPTY, dtype=torch.int32)
        uniform = torch.rand(size, dtype=torch.float64)
        bonus, sampled = torch.zeros(size, 1).int(), torch.zeros(size, dtype=torch.bool)
        random(output, ends, drafts, *rows, bonus, instead, uniform, sampled, 1, VOCABULARY, None,
               False, False)  # fmt: skip
        counts = torch.bincount(output[:, 0].long(), minlength=VOCABULARY).double()
        return float(((counts - size * target) ** 2 / (size * target)).sum())

    assert first(others) < 18.5  # p = 0.001
    assert first(drafts) > 1000  # control: rejected drafts are taken all the same


def test_every_patch_says_why_and_for_which_vllm():
    for patch in NPU_PATCHES:
        assert patch.reason
        assert all(patch.versions.contains(version) for version in ("0.30.0", "0.32.0"))
        assert not any(patch.versions.contains(version) for version in ("0.29.9", "0.33.0"))

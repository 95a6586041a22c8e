"""A small target and drafter whose distributions are known, and a chi-square test."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch

from ascend_specdecode import Purpose, inverse_cdf, uniforms

VOCABULARY = 8
START = 3
BATCH = 4000  # requests of one call: its tensors stay in the cache
WATCHED = 3  # tokens whose joint distribution is compared

Emit = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor
]
"""(draft_tokens, target_probs, draft_probs, seeds, positions) -> emitted tokens [B, K+1]."""

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(last tokens [B], seeds, positions) -> emitted tokens [B, any width]."""


@attrs.frozen
class Setting:
    """Sampling parameters and the number of drafted tokens."""

    temperature: float
    top_k: int
    top_p: float
    k: int

    def __str__(self) -> str:
        return f"T{self.temperature}-k{self.top_k}-p{self.top_p}-K{self.k}"


SETTINGS = tuple(
    Setting(*values)
    for values in (
        (1.0, 0, 1.0, 0), (1.0, 0, 1.0, 1), (1.0, 0, 1.0, 2), (1.0, 0, 1.0, 4), (1.0, 0, 1.0, 8),
        (0.5, 0, 1.0, 1), (0.5, 0, 1.0, 4), (0.2, 0, 1.0, 3), (2.0, 0, 1.0, 2), (3.0, 0, 1.0, 5),
        (1.0, 1, 1.0, 3), (1.0, 2, 1.0, 4), (1.0, 5, 1.0, 2), (0.7, 4, 1.0, 6), (1.0, 0, 0.9, 1),
        (1.0, 0, 0.5, 4), (0.8, 0, 0.95, 3), (1.0, 4, 0.8, 4), (0.6, 6, 0.7, 2), (1.5, 3, 0.6, 7),
    )
)  # fmt: skip
assert len(set(SETTINGS)) == 20


def tables(seed: int = 0, likeness: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [V, V] of target and drafter after each last token; the drafter is partly right."""
    generator = torch.Generator().manual_seed(seed)
    target, noise = 1.5 * torch.randn(2, VOCABULARY, VOCABULARY, generator=generator)
    return target, likeness * target + noise


def expected_rows(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """The distribution after each last token [V, V], float64, by the definition of each step."""
    rows = [_expected_row(row.double().tolist(), setting) for row in logits]
    return torch.tensor(rows, dtype=torch.float64)


def _expected_row(logits: list[float], setting: Setting) -> list[float]:
    weights = [math.exp(value / setting.temperature) for value in logits]
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    kept = order[: setting.top_k or None]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass < setting.top_p or not nucleus:
            nucleus.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weight / total if token in nucleus else 0.0 for token, weight in enumerate(weights)]


def joint(rows: torch.Tensor) -> torch.Tensor:
    """Probability of each sequence of ``WATCHED`` tokens after ``START``, flattened."""
    found = rows[START]
    for _ in range(WATCHED - 1):
        found = (found.unsqueeze(-1) * rows[torch.arange(found.numel()) % VOCABULARY]).flatten()
    return found


def draft(
    rows: torch.Tensor, last: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample k tokens one after another: tokens [B, k] and their distributions [B, k, V]."""
    tokens, probs = [], []
    for place in range(k):
        probs.append(rows[last])
        last = inverse_cdf(probs[-1], uniforms(seeds, positions + place, Purpose.DRAFT))
        tokens.append(last)
    empty = torch.empty(len(seeds), 0, dtype=torch.int64)
    wide = torch.empty(len(seeds), 0, VOCABULARY)
    return (torch.stack(tokens, 1), torch.stack(probs, 1)) if k else (empty, wide)


def linear_step(
    target: torch.Tensor, drafter: torch.Tensor, k: int, emit: Emit, *, with_probs: bool
) -> Step:
    """One step of linear drafts, ``target`` and ``drafter`` being distributions [V, V].

    Without probabilities the drafter proposes its most likely token.
    """
    rows = drafter
    if not with_probs:
        rows = torch.nn.functional.one_hot(drafter.argmax(-1), VOCABULARY).float()

    def step(last: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tokens, probs = draft(rows, last, seeds, positions, k)
        context = torch.cat([last.unsqueeze(1), tokens], dim=1)
        return emit(tokens, target[context], probs if with_probs else None, seeds, positions)

    return step


def streams(step: Step, trials: int) -> torch.Tensor:
    """The first ``WATCHED`` tokens of requests with seeds 0..trials-1: [trials, WATCHED]."""
    return torch.cat([_streams(step, part) for part in torch.arange(trials).split(BATCH)])


def _streams(step: Step, seeds: torch.Tensor) -> torch.Tensor:
    last = torch.full_like(seeds, START)
    length = torch.zeros_like(seeds)
    found = torch.full((len(seeds), WATCHED), -1)
    while int(length.min()) < WATCHED:
        emitted = step(last, seeds, length)
        count = (emitted >= 0).sum(dim=1)
        for place in range(WATCHED):
            write = (place >= length) & (place < length + count)
            found[write, place] = emitted[write, (place - length)[write]]
        last = emitted.gather(1, count.unsqueeze(1) - 1).squeeze(1)
        length = length + count
    return found


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """P-value of the counts of token sequences [N, WATCHED] against ``probabilities``."""
    index = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.unbind(1):
        index = index * VOCABULARY + column
    return chi_square_of(index, probabilities)


def chi_square_of(outcomes: torch.Tensor, probabilities: torch.Tensor) -> float:
    """P-value of outcomes [N] in 0..M-1 against ``probabilities`` [M] float64.

    The rarest outcomes are taken together until at least 5 are expected of them; an impossible one
    gives 0.
    """
    counts = torch.bincount(outcomes, minlength=len(probabilities)).double()
    expected = probabilities * len(outcomes)
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    order = expected.argsort()
    expected, counts = expected[order], counts[order]
    together = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    sizes = [min(together, len(expected)), max(len(expected) - together, 0)]
    (rare, kept), (rare_counts, kept_counts) = expected.split(sizes), counts.split(sizes)
    expected = torch.cat([rare.sum().unsqueeze(0), kept])
    counts = torch.cat([rare_counts.sum().unsqueeze(0), kept_counts])
    if len(expected) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))

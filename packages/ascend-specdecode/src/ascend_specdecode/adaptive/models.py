"""What adaptive k believes: how often each position is accepted, and what each call costs.

Both forget: an observation that is ``memory`` steps old counts 1/e.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

# Before anything is known a draft is taken to be accepted more often than not, so that it is tried.
_FIRST_ACCEPTANCE: Final = 0.6
_PRIOR_WEIGHT: Final = 8.0  # in drafts
_OUTLIER: Final = 4.0  # an observation counts at most as so many times the prediction
_LEAN: Final = 0.01  # weight of the prior slope, against the squared relative spread of the sizes
_TRUSTED: Final = 5.0  # observations after which outliers are recognised


class AcceptanceModel:
    """Chance that the drafted token at a position is accepted, given that those before it were.

    A position that was rarely reached is believed to be like the one before it.
    """

    def __init__(self, positions: int, memory: float) -> None:
        self._keep = math.exp(-1.0 / memory)
        self._tried = [0.0] * positions
        self._accepted = [0.0] * positions

    def observe(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from one step.

        Args:
            tried: drafts that reached each position (all before it were accepted).
            accepted: how many of them were accepted there.
        """
        if not any(tried):
            return  # a plain step teaches nothing, so it makes nothing older
        for position in range(len(self._tried)):
            self._tried[position] *= self._keep
            self._accepted[position] *= self._keep
        for position in range(min(len(tried), len(self._tried))):
            self._tried[position] += tried[position]
            self._accepted[position] += accepted[position]

    def chances(self) -> list[float]:
        """Return the chance of every position."""
        found = []
        prior = _FIRST_ACCEPTANCE
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            prior = (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)
            found.append(prior)
        return found


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """Return the mean tokens of a verified draft of k = 0, 1, ... len(chances) tokens.

    1 + p1 + p1 p2 + ...: the bonus or recovered token and every accepted prefix (Leviathan et al.
    2023, equation 1, with a chance of its own for each position).
    """
    total, survival = 1.0, 1.0
    found = [total]
    for chance in chances:
        survival *= chance
        total += survival
        found.append(total)
    return found


class AffineCost:
    """Seconds of a call as ``base + slope * size``, a forgetting least squares fit.

    Sizes that were all alike say nothing about the slope; the fit leans then on a prior: the cost
    is proportional to the size, or (``proportional`` False) the same for all sizes.
    """

    def __init__(self, memory: float, *, proportional: bool) -> None:
        self._keep = math.exp(-1.0 / memory)
        self._proportional = proportional
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._n > 0.0

    def observe(self, size: float, seconds: float) -> None:
        """Learn from one call."""
        if self._n >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * max(self.seconds(size), 1e-9))
        self._n = self._n * self._keep + 1.0
        self._x = self._x * self._keep + size
        self._y = self._y * self._keep + seconds
        self._xx = self._xx * self._keep + size * size
        self._xy = self._xy * self._keep + size * seconds

    def seconds(self, size: float) -> float:
        """Predict a call; 0 before the first observation."""
        if not self.known:
            return 0.0
        base, slope = self._fit()
        return max(0.0, base + slope * size)

    @property
    def slope(self) -> float:
        """Seconds that one more unit of size costs."""
        return self._fit()[1] if self.known else 0.0

    def _fit(self) -> tuple[float, float]:
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        ratio = mean_y / mean_x if mean_x else 0.0
        lean = _LEAN * mean_x * mean_x + 1e-12
        prior = ratio if self._proportional else 0.0
        slope = (self._xy / self._n - mean_x * mean_y + lean * prior) / (variance + lean)
        # Noise must not make more work cheaper, nor an empty call cost less than nothing.
        slope = min(max(slope, 0.0), ratio)
        return mean_y - slope * mean_x, slope


class StepCosts:
    """Costs of the two calls of a step.

    Attributes:
        draft: seconds of ``propose`` by k.
        score: seconds of ``score`` and ``verify`` by scored tokens of decoding requests.
    """

    def __init__(self, memory: float) -> None:
        self.draft = AffineCost(memory, proportional=True)
        self.score = AffineCost(memory, proportional=False)

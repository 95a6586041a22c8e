"""How the tokens of a request are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from ascend_specdecode.arguments import check_integer, check_number
from ascend_specdecode.errors import ArgumentError

_LARGEST_SEED: Final = 2**63 - 1


def _number(least: float, most: float, allowed: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[float], value: float) -> None:
        check_number(attribute.name, value, allowed, least=least, most=most)

    return check


def _frozen(bias: Mapping[int, float]) -> Mapping[int, float]:
    return MappingProxyType(dict(bias))


@attrs.frozen
class SamplingParameters:
    """Sampling of one request, with the names and meanings of vLLM and the OpenAI API.

    They apply in the order of vLLM's sampler: logit bias and penalties on the logits, temperature,
    top-k, top-p.

    Attributes:
        temperature: 0 is greedy (the default): the other fields but bias and penalties are then
            without effect.
        top_k: sample among the ``top_k`` most likely tokens; 0 is all.
        top_p: sample among the most likely tokens that together have this probability; in (0, 1].
        repetition_penalty: > 0; above 1 makes tokens of prompt and output less likely.
        presence_penalty: in -2..2; subtracted once from the logit of a token of the output.
        frequency_penalty: in -2..2; subtracted for each time a token is in the output.
        logit_bias: token id -> number added to its logit; -inf forbids the token.
        seed: 0..2^63-1, or None for one that the engine draws.

    Raises:
        ArgumentError: a field is out of range.
    """

    temperature: float = attrs.field(
        default=0.0, validator=_number(0.0, math.inf, "a finite number >= 0")
    )
    top_k: int = 0
    top_p: float = attrs.field(
        default=1.0, validator=_number(math.ulp(0.0), 1.0, "a number above 0 and up to 1")
    )
    repetition_penalty: float = attrs.field(
        default=1.0, validator=_number(math.ulp(0.0), math.inf, "a finite number > 0")
    )
    presence_penalty: float = attrs.field(
        default=0.0, validator=_number(-2.0, 2.0, "a number in -2..2")
    )
    frequency_penalty: float = attrs.field(
        default=0.0, validator=_number(-2.0, 2.0, "a number in -2..2")
    )
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_frozen, hash=False)
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        check_integer("top_k", self.top_k, least=0)
        if self.seed is not None:
            check_integer("seed", self.seed, least=0)
            if self.seed > _LARGEST_SEED:
                raise ArgumentError("seed", self.seed, f"at most {_LARGEST_SEED}")
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias token", token, least=0)
            if math.isnan(bias) or bias == math.inf:
                raise ArgumentError(f"logit_bias[{token}]", bias, "a number below +inf")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random number."""
        return self.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether a penalty or a bias changes the logits."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


GREEDY: Final = SamplingParameters()
"""The most likely token, no penalties."""

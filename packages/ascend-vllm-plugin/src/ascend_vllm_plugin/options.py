"""Options of this package inside vLLM's `--additional-config`, under the key `ascend`.

| option | default | meaning |
|---|---|---|
| `ngram_min` | 2 | shortest run of tokens that the n-gram drafters look up, in tokens |
| `ngram_max` | 4 | longest run of tokens that they look up |
| `suffix_min_match` | 2 | shortest repeated suffix that the suffix drafter goes by, in tokens |
| `composite` | `first` | `CompositeProposer`: `first` drafter that has something, or `race` |
| `composite_drafters` | `["suffix", "ngram"]` | its drafters, the preferred ones first |
| `draft_deadline_ms` | 5.0 | most milliseconds that a step waits for a draft; 0: never waits |
| `adaptive_k` | false | choose k, up to `num_speculative_tokens`, by measured worth |
| `draft_flash_attn` | `strict` | who may use the draft flash backend: `strict`, `wide`, `off` |
| `training_consistency` | false | attention as training computes it: backend `fa3` or none |

Example: `--additional-config '{"ascend": {"ngram_min": 3, "draft_flash_attn": "wide"}}'`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_vllm_plugin.errors import OptionError

KEY = "ascend"

GATE_MODES = ("strict", "wide", "off")
"""Values of `draft_flash_attn`; what they mean is in `ascend_attn_backends.judge_draft_gate`."""

COMPOSITES: Final = ("first", "race")
"""Values of `composite`: `FirstDrafter` and `RaceDrafter` of ascend-specdecode."""

DRAFTERS: Final = ("suffix", "ngram")
"""What `composite_drafters` may name: `SuffixDrafter` and `PromptLookupDrafter`."""


def _as_tuple(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen
class Options:
    """The validated options; see the table of this module."""

    ngram_min: int = 2
    ngram_max: int = 4
    draft_flash_attn: str = "strict"
    suffix_min_match: int = 2
    composite: str = "first"
    composite_drafters: tuple[str, ...] = attrs.field(default=DRAFTERS, converter=_as_tuple)
    draft_deadline_ms: float = 5.0
    adaptive_k: bool = False
    training_consistency: bool = False

    def __attrs_post_init__(self) -> None:
        self._check_drafters()
        for name in ("ngram_min", "ngram_max", "suffix_min_match"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionError(f"{KEY}.{name}", value, "a whole number of at least 1")
        if self.ngram_min > self.ngram_max:
            raise OptionError(f"{KEY}.ngram_min", self.ngram_min, f"at most {self.ngram_max}")
        if self.draft_flash_attn not in GATE_MODES:
            allowed = "one of: " + ", ".join(GATE_MODES)
            raise OptionError(f"{KEY}.draft_flash_attn", self.draft_flash_attn, allowed)
        for name in ("adaptive_k", "training_consistency"):
            if type(getattr(self, name)) is not bool:
                raise OptionError(f"{KEY}.{name}", getattr(self, name), "true or false")

    def _check_drafters(self) -> None:
        if self.composite not in COMPOSITES:
            allowed = "one of: " + ", ".join(COMPOSITES)
            raise OptionError(f"{KEY}.composite", self.composite, allowed)
        named = self.composite_drafters
        if type(named) is not tuple or not named or any(name not in DRAFTERS for name in named):
            allowed = "a list, not empty, of: " + ", ".join(DRAFTERS)
            found = list(named) if type(named) is tuple else named
            raise OptionError(f"{KEY}.composite_drafters", found, allowed)
        limit: object = self.draft_deadline_ms
        if type(limit) not in (int, float) or not 0 <= self.draft_deadline_ms < math.inf:
            allowed = "a number of milliseconds of at least 0"
            raise OptionError(f"{KEY}.draft_deadline_ms", limit, allowed)


def options_from(additional_config: object) -> Options:
    """Read our part of `vllm_config.additional_config`.

    Args:
        additional_config: what the user gave; other keys belong to other people.

    Raises:
        OptionError: `ascend` is no mapping, holds an unknown option, or a value is wrong.
    """
    given: Any = {}
    if isinstance(additional_config, Mapping):
        given = additional_config.get(KEY, {})
    allowed = ", ".join(field.name for field in attrs.fields(Options))
    if not isinstance(given, Mapping):
        raise OptionError(KEY, given, f"a mapping with any of: {allowed}")
    unknown = sorted(set(given) - set(attrs.fields_dict(Options)))
    if unknown:
        raise OptionError(f"{KEY}.{unknown[0]}", given[unknown[0]], f"one of: {allowed}")
    return Options(**given)

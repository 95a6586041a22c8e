"""Options of this package inside vLLM's `--additional-config`, under the key `ascend`.

| option | default | meaning |
|---|---|---|
| `ngram_min` | 2 | shortest run of tokens that `NgramProposer` looks up, in tokens |
| `ngram_max` | 4 | longest run of tokens that it looks up |
| `draft_flash_attn` | `strict` | who may use the draft flash backend: `strict`, `wide`, `off` |

Example: `--additional-config '{"ascend": {"ngram_min": 3, "draft_flash_attn": "wide"}}'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ascend_vllm_plugin.errors import OptionError

KEY = "ascend"

GATE_MODES = ("strict", "wide", "off")
"""Values of `draft_flash_attn`; what they mean is in `ascend_attn_backends.judge_draft_gate`."""


@attrs.frozen
class Options:
    """The validated options; see the table of this module."""

    ngram_min: int = 2
    ngram_max: int = 4
    draft_flash_attn: str = "strict"

    def __attrs_post_init__(self) -> None:
        for name in ("ngram_min", "ngram_max"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionError(f"{KEY}.{name}", value, "a whole number of at least 1")
        if self.ngram_min > self.ngram_max:
            raise OptionError(f"{KEY}.ngram_min", self.ngram_min, f"at most {self.ngram_max}")
        if self.draft_flash_attn not in GATE_MODES:
            allowed = "one of: " + ", ".join(GATE_MODES)
            raise OptionError(f"{KEY}.draft_flash_attn", self.draft_flash_attn, allowed)


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

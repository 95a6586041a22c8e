"""Settings of adaptive k."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_specdecode.arguments import check_integer, check_number


def _within(least: float, most: float) -> Any:
    def check(_: object, attribute: attrs.Attribute[float], value: object) -> None:
        allowed = f"a number in {least:g}..{most:g}"
        check_number(attribute.name, value, allowed, least=least, most=most)

    return check


@attrs.frozen(kw_only=True)
class AdaptiveConfig:
    """Settings of adaptive k; the defaults are meant to be kept.

    Attributes:
        memory: decoding steps after which an observation counts 1/e; longer is steadier, shorter
            follows changes faster.
        loss_limit: largest share of time that trying drafts may lose against plain decoding.
        warm_up: plain steps at the start, which measure what a step without drafts costs.

    Raises:
        ArgumentError: a setting is out of range.
    """

    memory: float = attrs.field(default=64.0, validator=_within(4.0, 1e6))
    loss_limit: float = attrs.field(default=0.03, validator=_within(0.0, 1.0))
    warm_up: int = 3

    def __attrs_post_init__(self) -> None:
        check_integer("warm_up", self.warm_up, least=1)

"""Example counts relative to the profile: ``HYPOTHESIS_PROFILE=long`` multiplies them."""

from __future__ import annotations

from hypothesis import settings

_CI_EXAMPLES = 60


def scale(examples: int) -> int:
    """``examples`` under the profile "ci", proportionally more under "long"."""
    return max(examples * settings.default.max_examples // _CI_EXAMPLES, 1)

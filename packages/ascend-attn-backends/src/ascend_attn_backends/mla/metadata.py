"""What the latent backend computes once per step, for all layers."""

from __future__ import annotations

import attrs

from ..partial_metadata import PartialMetadata
from .all_keys import AllKeysStep


@attrs.frozen(eq=False, kw_only=True)
class AscendMLAMetadata(PartialMetadata):
    """Metadata of one step; see :class:`PartialMetadata` for its other fields.

    Attributes:
        all_keys: The tokens of requests whose lengths stayed on the device; None without any.
    """

    all_keys: AllKeysStep | None = None

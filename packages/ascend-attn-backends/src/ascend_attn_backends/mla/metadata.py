"""What the latent backend computes once per step, for all layers."""

from __future__ import annotations

import attrs

from ..partial_metadata import PartialMetadata
from .all_keys import AllKeysStep


@attrs.frozen(eq=False, kw_only=True)
class AscendMLAMetadata(PartialMetadata):
    """Metadata of one step; see :class:`PartialMetadata` for its other fields.

    Attributes:
        all_keys: The step when its lengths stayed on the device, else None.
    """

    all_keys: AllKeysStep | None = None

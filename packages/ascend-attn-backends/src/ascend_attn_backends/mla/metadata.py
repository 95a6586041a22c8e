"""What the latent backend computes once per step, for all layers."""

from __future__ import annotations

import attrs

from ..partial_metadata import PartialMetadata


@attrs.frozen(eq=False, kw_only=True)
class AscendMLAMetadata(PartialMetadata):
    """Metadata of one step; see :class:`PartialMetadata` for its fields."""

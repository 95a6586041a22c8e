"""What the sparse latent backend computes once per step, for all layers."""

from __future__ import annotations

import attrs

from ..paged_step import PagedStep


@attrs.frozen(eq=False, kw_only=True)
class AscendSFAMetadata(PagedStep):
    """Metadata of one step; see :class:`PagedStep` for its fields.

    Attributes:
        num_reqs: Real requests B.
    """

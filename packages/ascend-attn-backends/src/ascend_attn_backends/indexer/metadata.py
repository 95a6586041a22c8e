"""What the indexer computes once per step, for all layers that choose keys."""

from __future__ import annotations

import attrs

from ..paged_step import PagedStep


@attrs.frozen(eq=False, kw_only=True)
class AscendSFAIndexerMetadata(PagedStep):
    """Metadata of one step over the index cache; see :class:`PagedStep` for its fields.

    Attributes:
        num_reqs: Real requests B.
    """

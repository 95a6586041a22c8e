"""Small frozen records: a figure with its source, the support of a dtype, of an operator."""

from __future__ import annotations

import attrs

from ascend_hwprofile.words import Confidence


@attrs.frozen
class Alternative:
    """Another value for the same figure, from a source that disagrees or measured otherwise."""

    value: int | float
    source: str
    note: str = ""


@attrs.frozen
class Figure:
    """One number with the document it comes from.

    Sizes are in bytes, clocks in MHz, bandwidths in GB/s (10^9 bytes per second).
    """

    value: int | float
    source: str
    confidence: Confidence
    note: str = ""
    alternatives: tuple[Alternative, ...] = ()


@attrs.frozen
class DtypeSupport:
    """Whether the cube unit computes a dtype, and the K of its 16 x 16 x K step."""

    name: str
    supported: bool
    cube_k: int | None
    source: str
    confidence: Confidence
    note: str = ""


@attrs.frozen
class FeatureSupport:
    """Whether an architecture has a feature. ``supported`` is None where documents are silent."""

    name: str
    supported: bool | None
    reason: str
    source: str
    confidence: Confidence


@attrs.frozen
class OperatorSupport:
    """Whether a product supports a CANN attention operator, and where that is written.

    ``supported`` is None where the documents are silent or disagree; ``reason`` then says so.
    """

    name: str
    supported: bool | None
    reason: str
    source: str
    confidence: Confidence
    limits: str = ""

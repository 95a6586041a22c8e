"""Base block sizes, shared by the plan and by the tiling of flash_attn itself."""

from __future__ import annotations

import attrs

_UNKNOWN_LENGTH = 2**31 - 1
_UNLIMITED_WINDOW = 2**32 - 1
_WIDE_KEYS_OVER = 128  # keys, and window keys, above which the wide block pays


@attrs.frozen
class BlockSizes:
    """Rows and keys of one block.

    Attributes:
        m: Rows of the fused (query, group) axis that one cube core takes with its vector cores.
        s2: Keys.
    """

    m: int
    s2: int


_TALL = (64, 128)
_WIDE = (32, 256)


def block_sizes(
    *,
    head_dim: int,
    group: int,
    longest: tuple[int, int],
    mask_mode: int,
    windows: tuple[int, int],
    vector_per_cube: int,
) -> BlockSizes:
    """Few query rows against many keys take wide blocks (32 x 256), the rest 64 x 128.

    Args:
        head_dim: D.
        group: Query heads per key head.
        longest: Largest query and key length, -1 for unknown.
        mask_mode: 0, 3 or 4.
        windows: (left, right), -1 for no limit.
        vector_per_cube: Vector cores per cube core; the rows are split over them.

    Source: ops-transformer flash_attn op_host/fa_adjust_sinner_souter.h.
    """
    queries, keys = (_UNKNOWN_LENGTH if n == -1 else n for n in longest)
    wide = False
    if head_dim <= 128:
        left, right = (_UNLIMITED_WINDOW if side == -1 else side for side in windows)
        visible = (0 if mask_mode == 0 else left) + (0 if mask_mode == 4 else right)
        wide = queries <= 64 and keys > _WIDE_KEYS_OVER and visible > _WIDE_KEYS_OVER
    elif head_dim == 256:
        wide = group * queries < 64
    rows, columns = _WIDE if wide else _TALL
    return BlockSizes(rows * vector_per_cube, columns)

"""Which sizes are captured, and which of them a step takes."""

from __future__ import annotations

import bisect
from itertools import pairwise

import attrs

from ..errors import InvalidFieldError


@attrs.frozen
class CaptureSizes:
    """The numbers of tokens for which decode steps are captured.

    Attributes:
        sizes: Tokens of each captured step, ascending; multiples of ``query_len``.
        query_len: Tokens per request: 1 for plain decoding, k + 1 for verifying k drafts.

    Raises:
        InvalidFieldError: There are no sizes, they do not ascend, or one is no multiple of
            ``query_len``.
    """

    sizes: tuple[int, ...] = attrs.field(converter=tuple)
    query_len: int = 1

    def __attrs_post_init__(self) -> None:
        if self.query_len < 1:
            raise InvalidFieldError("query_len", self.query_len, "at least 1")
        if not self.sizes or any(after <= before for before, after in pairwise(self.sizes)):
            raise InvalidFieldError("sizes", list(self.sizes), "at least one size, ascending")
        for place, size in enumerate(self.sizes):
            if size < 1 or size % self.query_len:
                raise InvalidFieldError(
                    f"sizes[{place}]",
                    size,
                    f"a multiple of the {self.query_len} tokens per request",
                )

    @property
    def largest(self) -> int:
        """The largest captured size."""
        return self.sizes[-1]

    def padded(self, num_tokens: int) -> int:
        """The next captured size that holds ``num_tokens`` tokens.

        Raises:
            InvalidFieldError: More tokens than the largest size; such a step runs eager.
        """
        place = bisect.bisect_left(self.sizes, num_tokens)
        if place == len(self.sizes):
            raise InvalidFieldError(
                "num_tokens", num_tokens, f"at most {self.largest}, the largest captured size"
            )
        return self.sizes[place]

    def require(self, size: int) -> None:
        """Check that ``size`` is one of the captured sizes.

        Raises:
            InvalidFieldError: It is not; lists those that are.
        """
        if size not in self.sizes:
            raise InvalidFieldError("size", size, " or ".join(map(str, self.sizes)))

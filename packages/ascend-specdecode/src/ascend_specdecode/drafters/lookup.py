"""Prompt lookup for an engine: n-grams of each sequence, indexed as it grows.

The rule is that of :func:`~ascend_specdecode.find_ngram` (the longest suffix of ``min_n`` to
``max_n`` tokens that occurred before, its most recent occurrence); the results are the same. That
function reads the whole context in every call, which suits vLLM's interface and short contexts;
here a token costs ``max_n - min_n + 1`` entries of a hash table once, and a call as many look-ups.
An entry takes about 100 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ascend_specdecode.drafters.held import PerSequence
from ascend_specdecode.drafters.learning import LookupDrafter
from ascend_specdecode.ngram import NgramMatch, check_lengths

_TOKEN: Final = 8
"""Bytes of a token id; an n-gram is looked up by its bytes."""


class NgramIndex:
    """Where each n-gram of one text ended last.

    Args:
        min_n: shortest n-gram, in tokens (>= 1).
        max_n: longest n-gram, in tokens (>= min_n).

    Raises:
        ArgumentError: a length is out of range.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        check_lengths(min_n, max_n)
        self._lengths = range(min_n, max_n + 1)
        # Of ends before that of the text itself: its own suffix is no earlier occurrence.
        self._ends: dict[bytes, int] = {}
        self._recent = b""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, tokens: NDArray[np.int64]) -> None:
        """Learn the next tokens [N], ids >= 0."""
        text = self._recent + tokens.tobytes()
        grown = self._size + len(tokens)
        start = grown - len(text) // _TOKEN  # of the bytes, in tokens
        for n in self._lengths:
            ends = range(max(self._size, n), grown)
            self._ends.update(
                (text[(end - n - start) * _TOKEN : (end - start) * _TOKEN], end) for end in ends
            )
        self._recent = text[-self._lengths[-1] * _TOKEN :]
        self._size = grown

    def find(self, assumed: Sequence[int] = ()) -> NgramMatch | None:
        """Find the longest n-gram at the end of the text and ``assumed`` that occurred before.

        Args:
            assumed: tokens that follow the learned ones in this call only.

        Returns:
            The match, the most recent one; None where no n-gram occurred before.
        """
        text = self._recent
        if assumed:
            text += np.array(assumed, dtype=np.int64).tobytes()
        size = self._size + len(assumed)
        for n in reversed(self._lengths):
            if n < size:
                end = self._last_end(text, n, size)
                if end is not None:
                    return NgramMatch(n, end)
        return None

    def _last_end(self, text: bytes, n: int, size: int) -> int | None:
        suffix = text[-n * _TOKEN :]
        for end in range(size - 1, self._size - 1, -1):  # ends among the assumed tokens
            stop = len(text) - (size - end) * _TOKEN
            if stop >= n * _TOKEN and text[stop - n * _TOKEN : stop] == suffix:
                return end
        return self._ends.get(suffix)


class PromptLookupDrafter(LookupDrafter[NgramIndex]):
    """Drafts what followed the last time the same words were written (vLLM: "ngram").

    Args:
        min_n: shortest suffix that counts, in tokens (>= 1).
        max_n: longest suffix looked for, in tokens (>= min_n).

    Raises:
        ArgumentError: a length is out of range.
    """

    def __init__(self, min_n: int = 1, max_n: int = 3) -> None:
        check_lengths(min_n, max_n)
        super().__init__(PerSequence(lambda: NgramIndex(min_n, max_n)))

"""Suffix drafts: the longest suffix that occurred before, of any length, in constant time a token.

A suffix automaton (Blumer et al. 1985) of a sequence's text recognises all of its substrings with
at most two states per token, and is extended by a token in amortised constant time. The link of
the state of the whole text stands for its longest suffix that occurred before; what followed there
is proposed (Hu et al. 2024, SAM Decoding).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ascend_specdecode.arguments import check_integer
from ascend_specdecode.drafters.held import PerSequence
from ascend_specdecode.drafters.learning import LookupDrafter
from ascend_specdecode.ngram import NgramMatch

_ROOT: Final = 0
_NONE: Final = -1

_REFRESHED: Final = 16
"""How many suffixes of the text learn their newest occurrence with each token.

All of them would cost as many steps as there are suffixes that occurred before, which repetitive
text makes long; the longest ones are those that a later look-up asks for.
"""


class SuffixAutomaton:
    """All substrings of one text, which grows at its end.

    Most states have one successor: it is kept in arrays, further ones in a dictionary.
    """

    def __init__(self) -> None:
        self._length = array("q", [0])  # of a state's longest substring
        self._link = array("q", [_NONE])
        self._end = array("q", [0])  # index after an occurrence, the newest that is known
        self._token = array("q", [_NONE])  # the first successor's token ...
        self._next = array("q", [_NONE])  # ... and state
        self._branches: dict[int, dict[int, int]] = {}
        self._last = _ROOT
        self._match = NgramMatch(0, 0)

    def __len__(self) -> int:
        return self._length[self._last]

    @property
    def num_states(self) -> int:
        """States, at most two per token."""
        return len(self._length)

    def extend(self, tokens: NDArray[np.int64]) -> None:
        """Learn the next tokens [N], ids >= 0."""
        for token in tokens.tolist():
            self._append(token)

    def find(self, assumed: Sequence[int] = ()) -> NgramMatch | None:
        """Find the longest suffix of the text and ``assumed`` that occurred before in the text.

        Args:
            assumed: tokens that follow the learned ones in this call only.

        Returns:
            The match; its end is that of the newest occurrence where the suffix is among the 16
            longest repeated ones whenever it occurs, else that of an older one. None where not
            even the last token occurred before.
        """
        match = self._follow(assumed) if assumed else self._match
        return match if match.length else None

    def _append(self, token: int) -> None:
        size = len(self) + 1
        new, state = self._add(size, size), self._last
        while state != _NONE and self._step(state, token) == _NONE:
            self._set(state, token, new)
            state = self._link[state]
        if state == _NONE:
            self._link[new] = _ROOT
        else:
            self._link[new] = self._split(state, token)
        self._last = new
        self._note_occurrence(new, size)

    def _split(self, state: int, token: int) -> int:
        """Return the state of exactly the longest substring of ``state`` and ``token``."""
        after = self._step(state, token)
        if self._length[after] == self._length[state] + 1:
            return after
        shorter = self._add(self._length[state] + 1, self._end[after])
        self._token[shorter], self._next[shorter] = self._token[after], self._next[after]
        if after in self._branches:
            self._branches[shorter] = self._branches[after].copy()
        self._link[shorter], self._link[after] = self._link[after], shorter
        at = state
        while at != _NONE and self._step(at, token) == after:
            self._set(at, token, shorter)
            at = self._link[at]
        return shorter

    def _note_occurrence(self, new: int, size: int) -> None:
        state = self._link[new]
        self._match = NgramMatch(self._length[state], self._end[state])
        for _ in range(_REFRESHED):
            if state == _ROOT:
                break
            self._end[state] = size
            state = self._link[state]

    def _follow(self, assumed: Sequence[int]) -> NgramMatch:
        state, length = self._last, len(self)
        for token in assumed:
            while state != _NONE and self._step(state, token) == _NONE:
                state = self._link[state]
                length = self._length[state] if state != _NONE else 0
            if state == _NONE:
                state, length = _ROOT, 0
            else:
                state, length = self._step(state, token), length + 1
        return NgramMatch(length, self._end[state])

    def _add(self, length: int, end: int) -> int:
        self._length.append(length)
        self._end.append(end)
        for column in (self._link, self._token, self._next):
            column.append(_NONE)
        return len(self._length) - 1

    def _step(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        branches = self._branches.get(state)
        return branches.get(token, _NONE) if branches else _NONE

    def _set(self, state: int, token: int, to: int) -> None:
        if self._token[state] in (_NONE, token):
            self._token[state], self._next[state] = token, to
        else:
            self._branches.setdefault(state, {})[token] = to


class SuffixDrafter(LookupDrafter[SuffixAutomaton]):
    """Drafts what followed the longest suffix of the context that occurred before.

    Args:
        min_match: shortest suffix that counts, in tokens (>= 1).

    Raises:
        ArgumentError: ``min_match`` is out of range.
    """

    def __init__(self, min_match: int = 1) -> None:
        check_integer("min_match", min_match, least=1)
        super().__init__(PerSequence(SuffixAutomaton), min_match)

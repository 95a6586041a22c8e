"""Prompt lookup: draft the tokens that followed the last time the same words were written.

Rule (prompt lookup decoding, Saxena 2023; vLLM calls the method "ngram"): take the longest suffix
of the context, between ``min_n`` and ``max_n`` tokens, that also occurs earlier in the context, and
propose the tokens that followed that earlier occurrence. When the same n-gram occurs several times
the most recent occurrence wins, because what was written last predicts best what comes next.
(vLLM's own drafter takes the first occurrence instead.)

Cost of one call on a context of L tokens: one pass over the context to find the last token's
earlier occurrences, then at most ``max_n - 1`` passes over the survivors of the pass before. That
is O(L) when tokens are varied and O(L * max_n) when every token is the same; never O(L * L). All
passes are vectorised in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ascend_specdecode.arguments import check_integer
from ascend_specdecode.errors import ArgumentError

TokenSequence: TypeAlias = Sequence[int] | NDArray[np.integer] | torch.Tensor
"""Token ids [L], all >= 0: a sequence of ints, an integer array, or an integer CPU tensor."""


@attrs.frozen
class NgramMatch:
    """An earlier occurrence of the context's suffix.

    Attributes:
        length: tokens of the suffix that matched.
        end: index of the first token after the earlier occurrence; always < len(context).
    """

    length: int
    end: int


def find_ngram(tokens: TokenSequence, min_n: int, max_n: int) -> NgramMatch | None:
    """Find the longest suffix of ``tokens`` that occurred before; the most recent one wins.

    The earlier occurrence may overlap the suffix but is never the suffix itself.

    Args:
        tokens: context [L], token ids >= 0.
        min_n: shortest suffix that counts, in tokens (>= 1).
        max_n: longest suffix looked for, in tokens (>= min_n).

    Returns:
        The match, or None when no suffix of ``min_n`` tokens or more occurred before.

    Raises:
        ArgumentError: a length is out of range, or ``tokens`` is not a 1-D integer sequence of
            ids >= 0 in host memory.
    """
    check_lengths(min_n, max_n)
    return _find(_as_context(tokens), min_n, max_n)


def propose_ngram(tokens: TokenSequence, min_n: int, max_n: int, k: int) -> list[int]:
    """Propose up to ``k`` tokens that followed the match of :func:`find_ngram`.

    Only tokens of the context are proposed: an occurrence that ends e tokens before the end of the
    context gives at most e tokens.

    Args:
        tokens: context [L], token ids >= 0.
        min_n: shortest suffix that counts, in tokens (>= 1).
        max_n: longest suffix looked for, in tokens (>= min_n).
        k: most tokens to propose (>= 0).

    Returns:
        Between 0 and ``k`` token ids; empty when nothing matched.

    Raises:
        ArgumentError: as :func:`find_ngram`, or ``k`` is negative.
    """
    check_lengths(min_n, max_n)
    check_integer("k", k, least=0)
    context = _as_context(tokens)
    match = _find(context, min_n, max_n)
    if match is None:
        return []
    return [int(token) for token in context[match.end : match.end + k]]


@attrs.frozen
class NgramDrafter:
    """The settings of prompt lookup, checked once; proposing has no state.

    Attributes:
        min_n: shortest suffix that counts, in tokens (>= 1).
        max_n: longest suffix looked for, in tokens (>= min_n).
        k: most tokens to propose (>= 0).

    Raises:
        ArgumentError: a setting is out of range.
    """

    min_n: int
    max_n: int
    k: int

    def __attrs_post_init__(self) -> None:
        check_lengths(self.min_n, self.max_n)
        check_integer("k", self.k, least=0)

    def propose(self, tokens: TokenSequence) -> list[int]:
        """Propose up to ``k`` tokens after the context ``tokens`` [L]; see :func:`propose_ngram`.

        Raises:
            ArgumentError: ``tokens`` is not a 1-D integer sequence of ids >= 0 in host memory.
        """
        return propose_ngram(tokens, self.min_n, self.max_n, self.k)


def _find(context: NDArray[np.integer], min_n: int, max_n: int) -> NgramMatch | None:
    """Filter the earlier ends of the 1-gram suffix down to those of ever longer suffixes."""
    size = context.size
    if size <= min_n:
        return None
    # An end is the index after an occurrence; the suffix itself would end at `size`.
    ends = np.flatnonzero(context[:-1] == context[-1]) + 1
    length = 1 if ends.size else 0
    while length and length < max_n:
        longer = ends[ends > length]
        longer = longer[context[longer - length - 1] == context[size - length - 1]]
        if not longer.size:
            break
        ends, length = longer, length + 1
    return NgramMatch(length, int(ends[-1])) if length >= min_n else None


def _as_context(tokens: TokenSequence) -> NDArray[np.integer]:
    """Return ``tokens`` as a 1-D integer array without copying arrays and CPU tensors."""
    if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
        raise ArgumentError("tokens", f"a tensor on {tokens.device}", "token ids in host memory")
    context = np.asarray(tokens)
    if context.ndim != 1:
        raise ArgumentError("tokens", f"{context.ndim} dimensions", "1 dimension")
    if context.size == 0:
        return np.empty(0, dtype=np.int64)
    if context.dtype.kind not in "iu":
        raise ArgumentError("tokens", f"dtype {context.dtype}", "integer token ids")
    # A placeholder such as -1 would be matched and then proposed to the target as a token.
    if context.min() < 0:
        first = int(np.argmax(context < 0))
        raise ArgumentError(f"tokens[{first}]", int(context[first]), "token ids >= 0")
    return context


def check_lengths(min_n: int, max_n: int) -> None:
    """Refuse lengths of n-grams that are not 1 <= min_n <= max_n.

    Raises:
        ArgumentError: names the length, what was found and what is allowed.
    """
    check_integer("min_n", min_n, least=1)
    check_integer("max_n", max_n, least=1)
    if max_n < min_n:
        raise ArgumentError("max_n", max_n, f"at least min_n ({min_n})")

"""A sequence as every part of a step sees it: a view by length over tokens that are only appended.

A step never copies a context: a state is (buffer, length), and the buffer never changes a token
that it holds. Going back to a shorter length is therefore a smaller number, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.parameters import GREEDY, SamplingParameters

_SMALLEST_CAPACITY = 64


class TokenBuffer:
    """The tokens of one sequence, int64, append only.

    Views stay what they were: growing moves to a larger array and leaves the old one to its views.

    Args:
        tokens: the prompt [L], ids >= 0.

    Raises:
        ArgumentError: ``tokens`` is not one dimension of integers >= 0.
    """

    __slots__ = ("_array", "_length")

    def __init__(self, tokens: Sequence[int] | NDArray[np.integer] = ()) -> None:
        given = np.asarray(tokens)
        if given.ndim != 1:
            raise ArgumentError("tokens", f"{given.ndim} dimensions", "1 dimension")
        if given.size and given.dtype.kind not in "iu":
            raise ArgumentError("tokens", f"dtype {given.dtype}", "integer token ids")
        if given.size and given.min() < 0:
            first = int(np.argmax(given < 0))
            raise ArgumentError(f"tokens[{first}]", int(given[first]), "token ids >= 0")
        self._array = np.empty(max(_SMALLEST_CAPACITY, 2 * given.size), dtype=np.int64)
        self._array[: given.size] = given
        self._length = given.size

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: Sequence[int]) -> None:
        """Add verified tokens at the end."""
        end = self._length + len(tokens)
        if end > self._array.size:
            larger = np.empty(2 * end, dtype=np.int64)
            larger[: self._length] = self._array[: self._length]
            self._array = larger
        self._array[self._length : end] = tokens
        self._length = end

    def view(self, start: int, end: int) -> NDArray[np.int64]:
        """Return tokens ``start``..``end`` without a copy, read-only."""
        part = self._array[start:end]
        part.flags.writeable = False
        return part


@attrs.frozen(eq=False)
class SequenceOrigin:
    """What stays the same for the whole life of a sequence.

    Attributes:
        sequence_id: unique in one engine; targets and drafters key their state by it.
        buffer: its tokens.
        prompt_length: tokens of the prompt; what follows was generated (frequency and presence
            penalties count only these).
        sampling: how its tokens are chosen.
        seed: ``sampling.seed``, or the one that was drawn where the request gave none.
    """

    sequence_id: int
    buffer: TokenBuffer
    prompt_length: int
    sampling: SamplingParameters = GREEDY
    seed: int = 0


@attrs.frozen(eq=False)
class SequenceState:
    """One sequence at one step; immutable.

    Tokens below ``length`` are verified and never change for this sequence id. ``assumed`` are
    guesses that follow them, given to a drafter that drafts ahead while the target still verifies:
    a later state of the same sequence may hold other tokens there, so a drafter with state keeps
    what it learned from verified tokens and goes back by length for the others.
    """

    origin: SequenceOrigin
    length: int
    assumed: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        tokens: Sequence[int] | NDArray[np.integer],
        sequence_id: int = 0,
        sampling: SamplingParameters = GREEDY,
        *,
        seed: int = 0,
        prompt_length: int | None = None,
    ) -> SequenceState:
        """Return the state of a sequence of its own, for use without an engine.

        Args:
            tokens: verified tokens [L].
            sequence_id: its id.
            sampling: how its tokens are chosen.
            seed: used where ``sampling`` has none.
            prompt_length: how many of ``tokens`` are the prompt; all by default.
        """
        buffer = TokenBuffer(tokens)
        length = len(buffer) if prompt_length is None else prompt_length
        drawn = seed if sampling.seed is None else sampling.seed
        return cls(SequenceOrigin(sequence_id, buffer, length, sampling, drawn), len(buffer))

    @property
    def sequence_id(self) -> int:
        """The id that targets and drafters key their state by."""
        return self.origin.sequence_id

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.origin.prompt_length

    @property
    def sampling(self) -> SamplingParameters:
        """How the tokens of this sequence are chosen."""
        return self.origin.sampling

    @property
    def seed(self) -> int:
        """Seed of its random stream; together with a position it names every random number."""
        return self.origin.seed

    @property
    def verified(self) -> NDArray[np.int64]:
        """The verified tokens [length], read-only, not a copy."""
        return self.origin.buffer.view(0, self.length)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Verified tokens and then the assumed ones; a copy only where there are assumed ones."""
        if not self.assumed:
            return self.verified
        return np.concatenate([self.verified, np.array(self.assumed, dtype=np.int64)])

    def __len__(self) -> int:
        return self.length + len(self.assumed)

    def since(self, start: int) -> NDArray[np.int64]:
        """Return the verified tokens from position ``start`` on, read-only, not a copy."""
        return self.origin.buffer.view(start, self.length)

    def assume(self, tokens: Sequence[int]) -> SequenceState:
        """Return this sequence as it would be if ``tokens`` were accepted."""
        return SequenceState(self.origin, self.length, (*self.assumed, *tokens))

    def at(self, length: int) -> SequenceState:
        """Return the first ``length`` verified tokens of this sequence.

        Raises:
            ArgumentError: ``length`` is not in 0..length of this state.
        """
        if not 0 <= length <= self.length:
            raise ArgumentError("length", length, f"0..{self.length}")
        return SequenceState(self.origin, length)

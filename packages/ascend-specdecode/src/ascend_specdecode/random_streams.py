"""Random numbers that are a function of (seed, position), not of who shares the batch.

Every number is the output of a counter-based generator, Philox-4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), whose key is the request's seed and whose counter
is

    word 0, 1   position: index in the sequence of the token that is decided, low and high half
    word 2      draw: 0, or the round where one position has several (siblings of a tree)
    word 3      purpose: see :class:`Purpose`

There is no state to carry along, so a batch can be cut, reordered or padded at will. Steps of one
request do not share numbers: a step that starts at position P and emits n tokens decides positions
P..P+n-1, and the next one starts at P+n. Numbers of later positions, which belonged to drafted
tokens after the first rejected one, were computed but decided nothing, so they are still fresh.
"""

from __future__ import annotations

import enum
from typing import Final

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


class Purpose(enum.IntEnum):
    """What a random number decides; numbers of different purposes are independent."""

    ACCEPT = 0  # whether a drafted token is accepted
    CHOOSE = 1  # which token is emitted where no drafted one is
    DRAFT = 2  # which token a drafter proposes


def uniforms(seeds: Tensor, positions: Tensor, purpose: Purpose, draws: Tensor | int = 0) -> Tensor:
    """Return the uniform number in [0, 1) of each (seed, position, purpose, draw).

    Args:
        seeds: int64, any shape that broadcasts with the others; all 64 bits count.
        positions: int64, index of the decided token in its sequence (>= 0).
        purpose: what the number decides.
        draws: int64, which of several numbers of the position (>= 0).

    Returns:
        float64 in the broadcast shape, multiples of 2^-53.
    """
    words = philox_4x32(
        (seeds & _WORD, (seeds >> 32) & _WORD),
        (positions & _WORD, (positions >> 32) & _WORD, draws, int(purpose)),
    )
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def philox_4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor | int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the Philox-4x32-10 output words of a key and a counter.

    Args:
        key: 2 words, counter: 4 words; int64 tensors (or ints) in 0..2^32-1 that broadcast.
        counter: see ``key``.

    Returns:
        4 words, int64 in 0..2^32-1.
    """
    k0, k1 = key
    c0, c1, c2, c3 = torch.broadcast_tensors(
        *(torch.as_tensor(word, device=k0.device) for word in counter)
    )
    for _ in range(_ROUNDS):
        # Signed 64-bit products wrap, which leaves their bits right.
        high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high[1] >> 32) & _WORD) ^ c1 ^ k0,
            high[1] & _WORD,
            ((high[0] >> 32) & _WORD) ^ c3 ^ k1,
            high[0] & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3

"""Exact draft-verify speculative decoding for any target and drafter."""

from ascend_specdecode.errors import ArgumentError, SpecDecodeError
from ascend_specdecode.ngram import (
    NgramDrafter,
    NgramMatch,
    TokenSequence,
    find_ngram,
    propose_ngram,
)
from ascend_specdecode.verification import PAD_TOKEN, verify_greedy

__all__ = [
    "PAD_TOKEN",
    "ArgumentError",
    "NgramDrafter",
    "NgramMatch",
    "SpecDecodeError",
    "TokenSequence",
    "find_ngram",
    "propose_ngram",
    "verify_greedy",
]

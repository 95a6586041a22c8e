"""The text that the tiny models learn: CPython's language reference, which every CPython ships.

``pydoc_data.topics`` is about 400,000 characters under the PSF licence; nothing is downloaded.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 1024
_HELD_OUT = 20  # one topic of this many is for validation


@attrs.frozen(eq=False)
class Corpus:
    """Token streams of the corpus.

    Attributes:
        tokenizer: Byte-level BPE, trained on the training topics alone.
        train: Training tokens, int64 [N]; every topic starts with the end-of-text token.
        validation: Tokens of the held-out topics, int64 [M].
    """

    tokenizer: Tokenizer
    train: torch.Tensor
    validation: torch.Tensor


def load(folder: Path | None = None) -> Corpus:
    """The corpus of the running interpreter; the split does not depend on a seed.

    Args:
        folder: Model folder whose ``tokenizer.json`` to use; None trains a tokenizer.
    """
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    random.Random(0).shuffle(topics)  # noqa: S311 - a split, not a secret
    held_out = max(1, len(topics) // _HELD_OUT)
    validation, train = topics[:held_out], topics[held_out:]
    saved = None if folder is None else Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = saved or _tokenizer(train)
    return Corpus(tokenizer, _encoded(tokenizer, train), _encoded(tokenizer, validation))


def _tokenizer(topics: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics, trainer)
    return tokenizer


def _encoded(tokenizer: Tokenizer, topics: Sequence[str]) -> torch.Tensor:
    start = tokenizer.token_to_id(END_OF_TEXT)
    return torch.tensor(
        [token for text in topics for token in (start, *tokenizer.encode(text).ids)]
    )


def batches(
    tokens: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Random windows of the stream, int64 [rows, length]."""
    starts = torch.randint(0, len(tokens) - length, (rows,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length)]

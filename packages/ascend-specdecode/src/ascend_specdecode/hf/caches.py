"""One Hugging Face cache per sequence, cropped by length."""

from __future__ import annotations

from typing import Any


class SequenceCaches:
    """Caches by sequence; going back to a shorter length keeps views and copies nothing.

    Args:
        config: configuration of the model that fills them.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._caches: dict[int, Any] = {}

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that have a cache."""
        return frozenset(self._caches)

    def at(self, sequence_id: int, length: int) -> Any:
        """The cache of a sequence, cut to ``length`` tokens; a new one for a new sequence."""
        if sequence_id not in self._caches:
            from transformers import DynamicCache

            self._caches[sequence_id] = DynamicCache(config=self._config)
        self.crop(sequence_id, length)
        return self._caches[sequence_id]

    def crop(self, sequence_id: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence, known or not."""
        cache = self._caches.get(sequence_id)
        surplus = 0 if cache is None else cache.get_seq_length() - length
        if cache is not None and surplus > 0:
            cache.crop(-surplus)

    def free(self, sequence_id: int) -> None:
        """Drop the cache of a sequence, known or not."""
        self._caches.pop(sequence_id, None)

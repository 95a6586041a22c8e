"""A drafter that is told what a model will say, and one that is wrong half of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ANSWERS: list[tuple[list[int], list[int]]] = []
"""Prompts, and what the target generates after them; filled in by a test of this process."""

WRONG = 3


class KnowingProposer:
    """Drafts what `ANSWERS` says, as vLLM's `method: "custom_class"` wants it."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = int(vllm_config.speculative_config.num_speculative_tokens)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """At most k tokens for each request that has sampled."""
        return [
            self.draft(token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist())
            if sampled
            else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def draft(self, tokens: list[int]) -> list[int]:
        for prompt, answer in ANSWERS:
            if tokens[: len(prompt)] == prompt:
                return answer[len(tokens) - len(prompt) :][: self.k]
        return []


class HalfKnowingProposer(KnowingProposer):
    """The second token of each draft is one that never comes."""

    def draft(self, tokens: list[int]) -> list[int]:
        known = super().draft(tokens)
        return [*known[:1], *([WRONG] if len(known) > 1 else []), *known[2:]]

"""A drafter that is never right, for comparisons."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_specdecode import Drafter, Proposal, SequenceState
from ascend_vllm_plugin import BackgroundProposer, Options

UNUSED_TOKEN = 3
"""A token of SmolLM2's vocabulary that no text has: `<repo_name>`."""


class WrongDrafter:
    """Drafts a token that never comes."""

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """The same k tokens for each."""
        return [Proposal((UNUSED_TOKEN,) * k) for _ in sequences]

    def forget(self, sequence_id: int) -> None:
        """It holds nothing."""


class WrongProposer(BackgroundProposer):
    """Drafts ahead, and always what never comes."""

    @staticmethod
    def drafter(options: Options) -> Drafter:
        """The drafter that is never right."""
        return WrongDrafter()

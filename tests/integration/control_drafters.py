"""A drafter that is never right, and one that takes its time, for comparisons."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ascend_specdecode import Drafter, Proposal, SequenceState, SuffixDrafter
from ascend_vllm_plugin import BackgroundProposer, Options

UNUSED_TOKEN = 3
"""A token of SmolLM2's vocabulary that no text has: `<repo_name>`."""


WRONG_SECONDS = 0.1
"""What a draft of the wrong drafter takes at least: so it never pays, however busy the machine."""


class WrongDrafter:
    """Drafts a token that never comes."""

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """The same k tokens for each."""
        time.sleep(WRONG_SECONDS)
        return [Proposal((UNUSED_TOKEN,) * k) for _ in sequences]

    def forget(self, sequence_id: int) -> None:
        """It holds nothing."""


class WrongProposer(BackgroundProposer):
    """Drafts ahead, and always what never comes."""

    @staticmethod
    def drafter(options: Options) -> Drafter:
        """The drafter that is never right."""
        return WrongDrafter()


DRAFT_SECONDS = 2.0
"""What a draft of the slow drafter takes at least."""


class SlowDrafter(SuffixDrafter):
    """Drafts well, and too late; while it sleeps its thread does nothing else."""

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """What the suffix drafter proposes, after a while."""
        time.sleep(DRAFT_SECONDS)
        return await super().propose(sequences, k)


class SlowProposer(BackgroundProposer):
    """Drafts ahead, slowly."""

    @staticmethod
    def drafter(options: Options) -> Drafter:
        """The drafter that takes its time."""
        return SlowDrafter(options.suffix_min_match)

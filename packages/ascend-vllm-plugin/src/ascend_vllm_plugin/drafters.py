"""Drafters of ascend-specdecode behind vLLM's `method: "custom_class"`.

vLLM 0.30 builds the class named by `speculative_config.model` with its config and calls
`load_model` once and `propose` once per step (vllm/v1/worker/gpu_model_runner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ascend_specdecode import NgramDrafter
from ascend_vllm_plugin.options import options_from

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from vllm.config import VllmConfig


class NgramProposer:
    """Drafts the tokens that followed the latest run of tokens when it occurred before.

    Use it with `--speculative-config '{"method": "custom_class", "model":
    "ascend_vllm_plugin.NgramProposer", "num_speculative_tokens": 4}'`; the lengths of the run
    come from `ascend_vllm_plugin.options`.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.num_speculative_tokens is None:
            raise ValueError("NgramProposer needs speculative_config.num_speculative_tokens")
        options = options_from(vllm_config.additional_config)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.drafter = NgramDrafter(
            min_n=options.ngram_min,
            max_n=options.ngram_max,
            k=int(speculative.num_speculative_tokens),
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load; vLLM calls it on every drafter."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft for each request of the batch.

        Args:
            sampled_token_ids: per request the tokens of this step; empty while its prompt is
                still being computed, and then nothing is drafted.
            num_tokens_no_spec: [max_num_reqs], tokens of the request without drafts, the ones
                of this step included.
            token_ids_cpu: [max_num_reqs, max_model_len], the tokens themselves.
            slot_mappings: unused; a drafter with a KV cache needs it.

        Returns:
            Per request at most k tokens, never beyond the length of the model.
        """
        return [
            self._draft(token_ids_cpu[row, : int(num_tokens_no_spec[row])]) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _draft(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        room = self.max_model_len - len(tokens)
        return self.drafter.propose(tokens)[: max(room, 0)]

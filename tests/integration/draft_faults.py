"""Faults for the tests of drafts: each breaks one thing that acceptance must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Repair = Callable[[], None]

BLOCK = 5
"""Query tokens of a request in a draft step: the anchor and four masks."""


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Repair:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    return lambda: setattr(owner, name, original)


def third_draft_wrong() -> Repair:
    """The third of a request's drafts is the token after the one that was meant."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    def make(original: Any) -> Any:
        def sample(self: Any, *args: Any) -> Any:
            tokens, probabilities = original(self, *args)
            tokens.view(-1, self.num_speculative_tokens)[:, 2] += 1
            return tokens, probabilities

        return sample

    return _replace(DFlashProposer, "_sample_draft_tokens", make)


def third_draft_wrong_on_v2() -> Repair:
    """The same on the V2 runner, whose speculator keeps its drafts itself."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    def make(original: Any) -> Any:
        def generate(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.draft_tokens[:, 2] += 1

        return generate

    return _replace(DFlash2Speculator, "_generate_draft", make)


def rejected_drafts_kept() -> Repair:
    """As above, and the drafter is not told that drafts were rejected."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    def make(original: Any) -> Any:
        def set_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **{**kwargs, "num_rejected_tokens_gpu": None})

        return set_inputs

    repairs = (third_draft_wrong(), _replace(DFlashProposer, "set_inputs_first_pass", make))
    return lambda: [repair() for repair in repairs].clear()


def no_candidate_selection() -> Repair:
    """A DFlash2 draft drafts as a DFlash draft does, each token on its own."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    def make(original: Any) -> Any:
        return lambda self, hidden_states, metadata: (self._greedy_sample(hidden_states), None)

    return _replace(DFlashProposer, "_sample_draft_tokens", make)


def context_forgotten() -> Repair:
    """The draft stores a context of zeros."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    def make(original: Any) -> Any:
        def store(self: Any, states: Any, *args: Any) -> Any:
            return original(self, 0.0 * states, *args)

        return store

    return _replace(DFlashQwen3ForCausalLM, "precompute_and_store_context_kv", make)


def block_hidden() -> Repair:
    """The draft's attention sees the context, and not the block itself."""
    import attrs

    from ascend_attn_backends import AscendFlashAttentionMetadataBuilder

    def make(original: Any) -> Any:
        def build(self: Any, *args: Any) -> Any:
            built = original(self, *args)
            shorter = (built.lengths.seq_lens - BLOCK).clamp(min=1)
            return attrs.evolve(built, lengths=attrs.evolve(built.lengths, seq_lens=shorter))

        return build

    return _replace(AscendFlashAttentionMetadataBuilder, "build", make)


FAULTS = {
    fault.__name__: fault
    for fault in (
        third_draft_wrong,
        third_draft_wrong_on_v2,
        rejected_drafts_kept,
        no_candidate_selection,
        context_forgotten,
        block_hidden,
    )
}

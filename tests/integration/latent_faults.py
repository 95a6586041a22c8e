"""Faults for the tests of several engines: each breaks one thing that a comparison must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Repair = Callable[[], None]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Repair:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    return lambda: setattr(owner, name, original)


def latents_without_causal_mask() -> Repair:
    """Tokens of a prompt see the tokens after them."""
    import attrs

    from ascend_attn_backends import AscendMLAImpl

    def make(original: Any) -> Any:
        def forward_mqa(self: Any, *args: Any) -> Any:
            *tensors, metadata, output = args
            launches = tuple(attrs.evolve(launch, causal=False) for launch in metadata.launches)
            return original(self, *tensors, attrs.evolve(metadata, launches=launches), output)

        return forward_mqa

    return _replace(AscendMLAImpl, "forward_mqa", make)


def training_attention_without_causal_mask() -> Repair:
    """The same for the backend that computes what training does."""
    import attrs

    from ascend_attn_backends import AscendFAImpl

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            *tensors, metadata, output = args
            return original(self, *tensors, attrs.evolve(metadata, causal=False), output)

        return forward

    return _replace(AscendFAImpl, "forward", make)


def half_of_the_choice() -> Repair:
    """The indexer forgets the second half of the keys that it chose."""
    from ascend_attn_backends import AscendSFAIndexerDCPImpl

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            chosen = original(self, *args)
            chosen[..., self.top_k // 2 :] = -1
            return chosen

        return forward

    return _replace(AscendSFAIndexerDCPImpl, "forward", make)


def compressed_keys_forgotten() -> Repair:
    """Tokens attend to the window alone where an indexer chose compressed keys for them."""
    import torch

    from ascend_attn_backends import AscendDSAIndexerImpl

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            return torch.full_like(original(self, *args), -1)

        return forward

    return _replace(AscendDSAIndexerImpl, "forward", make)


def states_forgotten() -> Repair:
    """Compressors do not remember the tokens of earlier steps."""
    from ascend_attn_backends import AscendDSACompressor

    def make(original: Any) -> Any:
        def forward(self: Any, hidden: Any, state: Any, *args: Any) -> Any:
            for part in state:
                part.zero_()
            return original(self, hidden, state, *args)

        return forward

    return _replace(AscendDSACompressor, "forward", make)


def drafts_off_by_one() -> Repair:
    """The drafter proposes the token after the one that it means."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    def make(original: Any) -> Any:
        def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) + 1

        return propose

    return _replace(EagleProposer, "propose", make)


def only_the_own_part() -> Repair:
    """Ranks that share keys leave out what the others have."""
    from ascend_attn_backends import DCPImplMixin
    from ascend_attn_ops import PartialAttention

    def make(original: Any) -> Any:
        def exchange_heads(self: Any, part: Any) -> Any:
            group = self.dcp_group
            out, lse = (tensor.chunk(group.size, 1)[group.rank] for tensor in (part.out, part.lse))
            return [PartialAttention(out, lse)]

        return exchange_heads

    return _replace(DCPImplMixin, "_exchange_heads", make)


def only_rows_of_the_first_rank() -> Repair:
    """Ranks that share a prompt do not write the latent rows of the ranks after the first."""
    from vllm.model_executor.layers.attention import mla_attention

    def make(original: Any) -> Any:
        def gather(latent: Any, rope: Any, slots: Any, *args: Any, **named: Any) -> Any:
            latents, ropes, all_slots = original(latent, rope, slots, *args, **named)
            if latents.shape[0] > latent.shape[0]:
                all_slots = all_slots.clone()
                all_slots[latent.shape[0] :] = -1
            return latents, ropes, all_slots

        return gather

    return _replace(mla_attention, "maybe_gather_mla_latent_cache_inputs", make)


FAULTS = {
    fault.__name__: fault
    for fault in (
        latents_without_causal_mask,
        training_attention_without_causal_mask,
        half_of_the_choice,
        compressed_keys_forgotten,
        states_forgotten,
        drafts_off_by_one,
        only_the_own_part,
        only_rows_of_the_first_rank,
    )
}

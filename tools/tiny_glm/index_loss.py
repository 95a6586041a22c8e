"""A loss for the indexer, which Hugging Face runs without gradients.

DeepSeek-V3.2 trains its indexer by the KL divergence between the main attention's distribution,
averaged over heads, and the softmax of the index scores over the same keys (its report, section
2.1.1). Here a hook on each attention module recomputes the scores with gradients from inputs that
are cut off from the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

_EVERY_KEY = 1 << 30


class IndexLosses:
    """Sums the losses of the attention modules that run while it is attached.

    Args:
        modules: GlmMoeDsaAttention modules, each with its own indexer.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._losses: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """Mean loss per module since the last call, a scalar."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean()

    @contextmanager
    def attached(self, *, dense: bool) -> Iterator[None]:
        """Collect losses; ``dense`` lets every row see every key, as early training does."""
        handles = [
            module.register_forward_hook(self._collect, with_kwargs=True)
            for module in self._modules
        ]
        kept = [module.indexer.index_topk for module in self._modules]
        for module in self._modules if dense else ():
            module.indexer.index_topk = _EVERY_KEY
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, top_k in zip(self._modules, kept, strict=True):
                module.indexer.index_topk = top_k

    def _collect(self, module: nn.Module, _args: Any, inputs: dict[str, Any], outputs: Any) -> None:
        wanted = outputs[1].detach().mean(dim=1)
        scores = index_scores(module, inputs["hidden_states"], inputs["position_embeddings"])
        chosen = wanted > 0
        logs = functional.log_softmax(scores.masked_fill(~chosen, -1e9), dim=-1)
        terms = torch.xlogy(wanted, wanted) - wanted * logs
        self._losses.append(terms.masked_fill(~chosen, 0.0).sum(-1).mean())


def index_scores(
    module: nn.Module, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Index scores, float32 [B, S, S], of hidden states [B, S, H]; unmasked."""
    hidden = hidden.detach()
    with torch.no_grad():
        residual = module.q_a_layernorm(module.q_a_proj(hidden))
    indexer = module.indexer
    turned = indexer.qk_rope_head_dim
    query = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    query_turned, key_turned = glm.apply_rotary_pos_emb_interleave(
        query[..., :turned], key[..., :turned], *rotary, unsqueeze_dim=2
    )
    query = torch.cat([query_turned, query[..., turned:]], dim=-1)
    key = torch.cat([key_turned, key[..., turned:]], dim=-1).squeeze(2)
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    scores = torch.einsum("bshd,btd->bsht", query, key) * indexer.softmax_scale
    return torch.einsum("bsht,bsh->bst", functional.relu(scores), weights)

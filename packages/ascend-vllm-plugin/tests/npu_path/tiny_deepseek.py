"""A tiny DeepSeek-V3 without experts: latent attention of the real sizes, random weights."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS = 2
SEED = 35
LEAD = 0.09
"""With this seed no best logit leads by less."""


def make(folder: Path) -> Path:
    """Write the model; every layer is a dense one, and the configuration says so."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=LAYERS,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    torch.manual_seed(SEED)
    DeepseekV3ForCausalLM(config).float().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_routed_experts": 0}))
    return folder

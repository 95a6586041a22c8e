"""A tiny Llama with random weights, its prompts, and what transformers makes of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

VOCABULARY = 512
LENGTHS = (20, 47, 150)
"""Tokens of the prompts: inside a block of 128, inside another one, and beyond it."""

NEW_TOKENS = 8
LEAD = 0.2
HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 4, 2, 64, 2


def prompts() -> list[list[int]]:
    """With this seed no best logit leads by less than `LEAD`: float16 decides as float32 does."""
    generator = random.Random(101)
    return [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def make(folder: Path, **changes: Any) -> Path:
    """Write the model; changes go to its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        **changes,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**fields)).float().save_pretrained(folder)
    return folder


def greedy(model: Path) -> tuple[list[list[int]], float]:
    """What transformers generates in float32, and the smallest lead of a best logit."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens, leads = [], []
    with torch.no_grad():
        for prompt in prompts():
            done = loaded.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens.append(done.sequences[0, len(prompt) :].tolist())
            best = torch.stack(done.logits).squeeze(1).topk(2).values
            leads.append(float((best[:, 0] - best[:, 1]).min()))
    return tokens, min(leads)

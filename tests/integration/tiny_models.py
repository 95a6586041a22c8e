"""Tiny models with random weights, made by transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SLIDING_WINDOW = 24
VOCABULARY = 512
LENGTHS = (20, 47, 130)
PERIOD = 8
"""Tokens of a text that a repeating model says again and again."""


def random_prompts() -> list[list[int]]:
    """Prompts of `LENGTHS` tokens: inside the window, beyond it, and beyond a block of 128.

    With this seed the best logit is never closer than 0.007 to the second; with others it can be
    3e-5, and then rounding decides.
    """
    generator = random.Random(2)
    return [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def make_sliding_qwen3(folder: Path) -> Path:
    """Qwen3 with three layers that all have a sliding window; random weights, float32."""
    return _make_qwen3(
        folder,
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW,
        max_window_layers=0,
        layer_types=["sliding_attention"] * 3,
    )


def make_qwen3(folder: Path) -> Path:
    """The same without sliding windows."""
    return _make_qwen3(folder, use_sliding_window=False)


def _make_qwen3(folder: Path, **attention: Any) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        **attention,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return _save(Qwen3ForCausalLM, config, folder)


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    """A model with random weights, float32."""
    import torch

    torch.manual_seed(0)
    model_class(config).float().save_pretrained(folder)
    return folder


def make_llama(folder: Path) -> Path:
    """Llama with one key/value head, which two ranks both have; random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return _save(LlamaForCausalLM, config, folder)


def make_mla_config(folder: Path, **changes: Any) -> Path:
    """The configuration of a tiny DeepSeek-V2 (MLA) with changes, and no weights at all."""
    from transformers import DeepseekV2Config

    folder.mkdir(parents=True, exist_ok=True)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=512,
    ).to_dict()
    config["architectures"] = ["DeepseekV2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder

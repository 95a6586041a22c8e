"""Tiny targets and their DFlash drafts: configurations, and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sturdy_weights import sturdy

VOCABULARY = 512
HIDDEN = 128
LAYERS = 2
HEAD_SIZE = 64
HEADS, KV_HEADS = 4, 2
MASK_TOKEN = VOCABULARY - 1

DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 160,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk_freq": 1,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}
"""A tiny GLM-5: sizes that the operators fix are the real ones."""

SELECTOR = {"selector_top_k": 8, "selector_rank": 16, "conv_kernel_size": 2, "conv_group_size": 32}
"""What a DFlash2 draft has beyond a DFlash draft: candidates, and convolutions inside a block."""


def draft_config(architecture: str, target_layers: list[int], **further: Any) -> dict[str, Any]:
    """The `config.json` of a draft with `LAYERS` Qwen3-like layers.

    Args:
        architecture: `DFLASH` or `DFLASH2`.
        target_layers: layers of the target whose outputs the draft reads.
        further: changed or added keys.
    """
    options = {"mask_token_id": MASK_TOKEN, "target_layer_ids": target_layers}
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "block_size": 8,
        "layer_types": ["full_attention"] * LAYERS,
        "dflash_config": options | (SELECTOR if architecture == DFLASH2 else {}),
        **further,
    }


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder with a configuration and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def make_qwen3_config(folder: Path, **further: Any) -> Path:
    """A dense target without weights, of the same head size as the draft."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return write_config(folder, {**config, **further})


def make_glm_config(folder: Path, **further: Any) -> Path:
    """A `glm_moe_dsa` target (latent attention, keys chosen by an indexer) without weights."""
    return write_config(folder, {**GLM, **further})


def make_sturdy_glm(folder: Path) -> Path:
    """A `glm_moe_dsa` target with random weights whose answers survive half precision.

    Two choices of such a model jump when a number moves a little: which experts a token has, and
    which keys it sees. Here every token has the same two experts, with weights of its own, and the
    indexer leaves out a few of many keys, at the end of the longest prompt only.
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    model = sturdy(GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**GLM))
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return write_config(folder, {**written, **GLM})


def make_random_draft(folder: Path, architecture: str, target_layers: list[int]) -> Path:
    """A draft with random weights, which is hardly ever right.

    Args:
        folder: where it goes.
        architecture: `DFLASH` or `DFLASH2`.
        target_layers: layers of the target whose outputs the draft reads.
    """
    import torch
    from safetensors.torch import save_file

    write_config(folder, draft_config(architecture, target_layers))
    generator = torch.Generator().manual_seed(1)
    shapes = draft_shapes(architecture, len(target_layers))
    weights = {
        name: 0.05 * torch.randn(shape, generator=generator)
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }
    for name, value in weights.items():
        if name.endswith("base_kernel"):
            value[:, 0] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draft_shapes(architecture: str, num_target_layers: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in a draft's checkpoint."""
    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    taps, rank = SELECTOR["conv_kernel_size"], SELECTOR["selector_rank"]
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, HIDDEN),
        "self_attn.k_proj.weight": (keys, HIDDEN),
        "self_attn.v_proj.weight": (keys, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, queries),
        "self_attn.q_norm.weight": (HEAD_SIZE,),
        "self_attn.k_norm.weight": (HEAD_SIZE,),
        "mlp.gate_proj.weight": (2 * HIDDEN, HIDDEN),
        "mlp.up_proj.weight": (2 * HIDDEN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 2 * HIDDEN),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, HIDDEN * num_target_layers),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    if architecture == DFLASH2:
        projection = 2 * taps * HIDDEN // SELECTOR["conv_group_size"]
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, taps, HIDDEN)
            layer[f"{name}.kernel_projection.weight"] = (projection, HIDDEN)
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (VOCABULARY, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, HIDDEN)
    for index in range(LAYERS):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes

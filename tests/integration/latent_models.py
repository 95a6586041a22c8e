"""Tiny models with latent attention: DeepSeek-V3 and GLM-5, made by transformers.

Sizes that the operators fix are those of the real models (latents of 512, rotary parts of 64, index
rows of 128); everything else is as small as it can be. Seeds and scales are chosen such that the
best logit is never close to the second one: see `MIN_MARGIN` in the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sturdy_weights import sturdy
from tiny_models import PERIOD

VOCABULARY = 512
HIDDEN = 128
HEADS = 4
TOP_K = 32
"""Keys that a token of the sparse model attends to: fewer than two of the prompts have."""

GLM_LAYERS = 3
"""The last one attends to the keys that the one before it chose."""

Edit = Callable[[dict[str, torch.Tensor], torch.Generator], None]
"""Changes the weights of a model in place."""

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK_V4: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["moe"] * 3,
    "num_attention_heads": HEADS,
    "head_dim": 512,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 64,  # what vLLM's kernel for CPUs routes to: 6 or 8 of 64 or more
    "num_experts_per_tok": 6,
    "sliding_window": 32,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 16,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Layers with the window alone, with chosen compressed keys, and with all of fewer such keys."""

_FOR_VLLM: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
}
"""Keys that vLLM reads and transformers leaves out when it writes a configuration."""

_THIRD_LAYER_SHARES = {"index_topk_freq": 2, "index_skip_topk_offset": 2}
"""Every second layer from the third on has no indexer."""


def make_deepseek_v3(folder: Path) -> Path:
    """DeepSeek-V3 with two layers (MLA); random weights, float32."""
    from transformers import DeepseekV3ForCausalLM

    return _save(DeepseekV3ForCausalLM, _deepseek_v3_config(), folder, seed=1)


def make_drafting_deepseek_v3(folder: Path, share: float) -> Path:
    """DeepSeek-V3 with an MTP layer that drafts as the one of `make_drafting_glm` does."""
    from transformers import DeepseekV3ForCausalLM

    config = _deepseek_v3_config()
    _save(DeepseekV3ForCausalLM, config, folder, seed=1, num_nextn_predict_layers=1)
    _edit_weights(folder, _drafting(config.num_hidden_layers, share))
    return folder


def make_repeating_deepseek_v3(folder: Path) -> Path:
    """DeepSeek-V3 that says the tokens of a group of `PERIOD` again and again.

    Its layers add so little that each token follows from the one before it alone.
    """
    from transformers import DeepseekV3ForCausalLM

    def edit(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
        groups = torch.arange(VOCABULARY).view(-1, PERIOD)
        _answer_in_turn(weights, generator, share=0.1, before=groups.roll(1, 1).flatten())

    _save(DeepseekV3ForCausalLM, _deepseek_v3_config(), folder, seed=1)
    _edit_weights(folder, edit)
    return folder


def _deepseek_v3_config() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**_SHARED, num_hidden_layers=2, n_group=2, topk_group=1)


def make_glm(folder: Path) -> Path:
    """GLM-5 (`glm_moe_dsa`) with three layers and one MTP layer; random weights, float32.

    The third layer attends to the keys that the second one chose. The MTP layer is the third layer
    again with a little noise, and hardly drafts anything that is accepted.
    """
    _save_glm(folder)

    def edit(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
        _add_noisy_mtp(weights, generator, GLM_LAYERS)

    _edit_weights(folder, edit)
    return folder


def make_drafting_glm(folder: Path, share: float) -> Path:
    """GLM-5 whose MTP layer drafts what the target may say next.

    The head answers token t with token t + 1, in the target as in the MTP layer; what the layers
    add makes both of them deviate.

    Args:
        folder: where the model goes.
        share: how much the layers add, 1 being what they add in `make_glm`.
    """
    _save_glm(folder)
    _edit_weights(folder, _drafting(GLM_LAYERS, share))
    return folder


def _drafting(layers: int, share: float) -> Edit:
    """Adds an MTP layer behind so many layers that drafts what the target may say."""

    def edit(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
        _add_noisy_mtp(weights, generator, layers)
        _answer_in_turn(weights, generator, share, torch.arange(VOCABULARY).roll(1))
        eye = torch.eye(HIDDEN)
        weights[f"model.layers.{layers}.eh_proj.weight"] = torch.cat([eye, 0.3 * eye], 1)

    return edit


def make_deepseek_v4(folder: Path) -> Path:
    """DeepSeek-V4 with one layer of each kind; random weights, in the names of its checkpoints.

    vLLM computes this model in half precision only. The choice of experts would jump with the last
    bit of a number, so every token has the same six, with weights of its own.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model = sturdy(DeepseekV4ForCausalLM, DeepseekV4Config(**DEEPSEEK_V4))
    model.save_pretrained(folder)
    _edit_weights(folder, _as_in_checkpoints)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    for name in ("layer_types", "mlp_layer_types"):  # vLLM goes by the ratios
        del written[name]
    ratios = {"compress_ratios": [0, 4, 128], "num_hash_layers": 0, "topk_method": "noaux_tc"}
    path.write_text(json.dumps({**written, **ratios}, indent=1), encoding="utf-8")
    return folder


def _as_in_checkpoints(weights: dict[str, torch.Tensor], _: torch.Generator) -> None:
    """Names of DeepSeek-V4's own files, where transformers writes others."""
    renamed = {
        name.removeprefix("model.")
        .replace(".attn.norm.", ".attn.kv_norm.")
        .replace("hc_head.hc_", "hc_head_")
        .replace("embed_tokens.", "embed."): weight
        for name, weight in weights.items()
    }
    weights.clear()
    weights.update(renamed)


def _save_glm(folder: Path) -> None:
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(
        **_SHARED,
        num_hidden_layers=GLM_LAYERS,
        n_group=1,
        topk_group=1,
        index_topk=TOP_K,
        index_head_dim=128,
        # With a few heads and random weights many scores are 0 at once, and the choice among
        # equals is anybody's.
        index_n_heads=16,
        **_THIRD_LAYER_SHARES,
    )
    further = {"indexer_rope_interleave": True, "num_nextn_predict_layers": 1}
    _save(GlmMoeDsaForCausalLM, config, folder, seed=0, **further, **_THIRD_LAYER_SHARES)


def _save(model_class: Any, config: Any, folder: Path, seed: int, **further: Any) -> Path:
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**written, **_FOR_VLLM, **further}, indent=1), encoding="utf-8")
    return folder


def _edit_weights(folder: Path, edit: Edit) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights, torch.Generator().manual_seed(3))
    save_file(weights, path, metadata={"format": "pt"})


def _add_noisy_mtp(
    weights: dict[str, torch.Tensor], generator: torch.Generator, layers: int
) -> None:
    source, target = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in weights if name.startswith(source)]:
        noise = 0.01 * torch.randn(weights[name].shape, generator=generator)
        weights[target + name.removeprefix(source)] = weights[name] + noise
    chooser = f"model.layers.{layers - 2}.self_attn.indexer."
    for name in [name for name in weights if name.startswith(chooser)]:
        own = f"{target}self_attn.indexer.{name.removeprefix(chooser)}"
        weights[own] = weights[name].clone()
    eye = torch.eye(HIDDEN)
    ones = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    weights.update({target + name: torch.ones(HIDDEN) for name in ones})
    weights[f"{target}eh_proj.weight"] = torch.cat([0.3 * eye, 0.7 * eye], 1)
    weights[f"{target}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{target}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()


def _answer_in_turn(
    weights: dict[str, torch.Tensor],
    generator: torch.Generator,
    share: float,
    before: torch.Tensor,
) -> None:
    """Answer the token `before[t]` with t, and let the layers add a share of what they added."""
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    head = 0.1 * embedding[before]
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weights[name] = embedding.clone()
        elif name == "lm_head.weight" or name.endswith("shared_head.head.weight"):
            weights[name] = head.clone()
        elif "o_proj" in name or "down_proj" in name:
            weights[name] = weight * share

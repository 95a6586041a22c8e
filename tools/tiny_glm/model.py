"""The tiny glm_moe_dsa and its multi-token-prediction (MTP) layer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from ascend_specdecode.hf import MtpLayer

LAYERS = 3
_SPREAD = 0.03  # standard deviation of the initial weights

# What vLLM's model code reads and Hugging Face's configuration class does not know.
VLLM_KEYS = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "indexer_rope_interleave": True,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "ep_size": 1,
}


def configuration(vocabulary: int) -> GlmMoeDsaConfig:
    """Small, with the latent (512 + 64) and index head (128) sizes that kernels are made for."""
    config = GlmMoeDsaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        q_lora_rank=96,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_topk=64,
        index_head_dim=128,
        index_n_heads=8,
        indexer_types=["full"] * LAYERS,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=_SPREAD,
        attn_implementation="eager",
    )
    config._experts_implementation = "eager"
    return config


def target(vocabulary: int) -> GlmMoeDsaForCausalLM:
    """A target with fresh weights."""
    model = GlmMoeDsaForCausalLM(configuration(vocabulary))
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.normal_(parameter, std=0.02)
    return model


def mtp_layer(config: GlmMoeDsaConfig) -> MtpLayer:
    """An MTP layer with fresh weights; embedding and head are the target's."""
    mtp = MtpLayer(config)
    for parameter in mtp.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=_SPREAD)
    return mtp


def causal_mask(length: int) -> torch.Tensor:
    """Additive mask, float32 [1, 1, length, length]."""
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(1, 1, length, length).masked_fill(hidden, lowest)


def save(model: GlmMoeDsaForCausalLM, mtp: MtpLayer, folder: Path) -> None:
    """Write config.json and model.safetensors in bfloat16, the MTP layer as one layer more.

    Hugging Face names the weights of its own layers, so the MTP layer is put into a model of one
    layer more before that is saved; what only an MTP layer has is added under the names that
    GLM checkpoints use.
    """
    shell = GlmMoeDsaForCausalLM(_deeper(model.config))
    prefix = f"model.layers.{LAYERS}."
    decoder = {prefix + name: tensor for name, tensor in mtp.layer.state_dict().items()}
    shell.load_state_dict(model.state_dict() | decoder)
    shell.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    extra = {
        "enorm.weight": mtp.enorm.weight,
        "hnorm.weight": mtp.hnorm.weight,
        "eh_proj.weight": mtp.eh_proj.weight,
        "shared_head.norm.weight": mtp.norm.weight,
        "shared_head.head.weight": model.lm_head.weight,
        "embed_tokens.weight": model.model.embed_tokens.weight,
    }
    weights |= {
        prefix + name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in extra.items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by its owner alone
    config = model.config.to_dict() | VLLM_KEYS
    config |= {"architectures": ["GlmMoeDsaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def _deeper(config: GlmMoeDsaConfig) -> GlmMoeDsaConfig:
    data = config.to_dict()
    for name in ("indexer_types", "layer_types", "mlp_layer_types"):
        data[name] = [*data[name], data[name][-1]]
    data["num_hidden_layers"] = LAYERS + 1
    return GlmMoeDsaConfig.from_dict(data)

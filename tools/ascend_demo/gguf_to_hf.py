"""A llama-type GGUF file as a Hugging Face folder: config, float32 weights, tokenizer.

Reading and dequantising are the `gguf` package's; the names, the rotary row order and the
tokenizer settings are what llama.cpp's converter (convert_hf_to_gguf.py) did, undone. Weights stay
float32, so that they are bit for bit what the GGUF file holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ascend_demo.errors import ModelError

Advance = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_OUTER_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp's pre-tokenizer name -> does every digit stand alone before byte-level BPE?
_DIGITS_APART: Final = {"smollm": True, "gpt-2": False}
_CONTROL_TOKEN: Final = 3


def convert(gguf_file: Path, folder: Path, advance: Advance) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer files into `folder`.

    Raises:
        ModelError: the file is no GGUF file, or describes something else than a llama model with
            a byte-level BPE tokenizer.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise ModelError(f"{gguf_file} cannot be read as GGUF: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _require(fields, "general.architecture", ("llama",))
    _require(fields, "tokenizer.ggml.model", ("gpt2",))
    _require(fields, "tokenizer.ggml.pre", tuple(_DIGITS_APART))
    names = _write_weights(reader, fields, folder / "model.safetensors", advance)
    _write_config(fields, tied="lm_head.weight" not in names, folder=folder)
    _write_tokenizer(fields, folder)


def _require(fields: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> None:
    if fields.get(name) not in allowed:
        raise ModelError(f"GGUF field {name}: found {fields.get(name)!r}, allowed {allowed}")


def _write_weights(
    reader: Any, fields: Mapping[str, Any], file: Path, advance: Advance
) -> set[str]:
    """Dequantise every tensor; return the names written."""
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    weights: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        name = huggingface_name(tensor.name)
        weights[name] = np.ascontiguousarray(_half_split_rows(name, values, fields))
        advance(done, len(reader.tensors))
    save_file(weights, file, metadata={"format": "pt"})
    return set(weights)


def huggingface_name(name: str) -> str:
    """Translate `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        ModelError: the name belongs to no llama model.
    """
    parts = name.split(".")
    if parts[-1] == "weight" and len(parts) == 2 and parts[0] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[parts[0]]}.weight"
    if parts[-1] == "weight" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    raise ModelError(f"GGUF tensor {name!r} belongs to no llama model")


def _half_split_rows(
    name: str, values: NDArray[np.float32], fields: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Give query and key rows the half-split rotary order of Hugging Face.

    GGUF keeps the two rows of a rotary pair beside each other, [heads, D/2, 2]; Hugging Face keeps
    all first rows, then all second rows, [heads, 2, D/2].
    """
    counts = {
        "q_proj.weight": fields["llama.attention.head_count"],
        "k_proj.weight": fields["llama.attention.head_count_kv"],
    }
    heads = counts.get(name.partition("self_attn.")[2])
    if heads is None:
        return values
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_config(fields: Mapping[str, Any], tied: bool, folder: Path) -> None:
    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores float32; seven digits are all it holds (1e-05, not 9.99999974e-06).
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if _DIGITS_APART[fields["tokenizer.ggml.pre"]]:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = fields["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields, tokens))


def _tokenizer_config(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")

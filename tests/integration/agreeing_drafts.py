"""A target that answers token t with t + 1, and drafts that must agree, by their weights alone.

Tokens are points on circles: the embedding of t holds (cos, sin) of 2 pi f t / V for some
frequencies f, so that "the token d further on" is a rotation, and a matrix. The draft knows the
answer only through its attention:

- Layer 0 finds out which mask of the block a row is. Head h looks exactly h + 1 positions back,
  and reads a flag that only the anchor (the last token that is certain) has.
- Layer 1 fetches the token before the anchor, which it can find in the context alone: keys and
  values that vLLM computed from the target's hidden states and stored. Head h serves mask h + 1:
  it looks h + 2 positions back and rotates what it finds by h + 2 tokens. The heads of other
  masks look at masks, which keys of layer 1 mark, and whose values are 0.

"Exactly n positions back" is a query equal to the key rotated by n positions: under RoPE their
product is largest there. A wrong length, a lost key, a wrong mask or position, and the draft does
not agree any more.

A DFlash2 draft is made to prefer a wrong token on its own (3 further on), and only its candidate
selector, scoring pairs of neighbours, prefers the right one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from draft_models import (
    DFLASH2,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MASK_TOKEN,
    SELECTOR,
    VOCABULARY,
    draft_config,
    write_config,
)

NUM_DRAFTS = 4
CIRCLES = 60
CONSTANT, ANCHOR, MASK, SLOT = 120, 121, 122, 123
"""Coordinates after those of the circles: in every token, in real tokens, in masks, and of layer
0's finding, one for each mask of the block."""
READ = 32
"""Circles that the draft reads: two coordinates each, as many as a head has."""
WRONG = 3
"""How much further on the token is that a DFlash2 draft prefers without its selector."""

NEAR = 8
"""Pairs of a head that tell positions apart: those that RoPE rotates fastest."""
FAR = 31
"""The pair that tells masks from tokens: RoPE hardly rotates it."""
SHARPNESS = 16.0
"""Weight of the queries' norm: the best key gets all of the attention."""


def agree(weights: dict[str, torch.Tensor]) -> None:
    """Make a target answer t with t + 1: the embedding outweighs what its layers add.

    Args:
        weights: of a transformers model with `HIDDEN` and `VOCABULARY`; changed in place.
    """
    codes = _codes(VOCABULARY, _frequencies(CIRCLES))
    embedding = torch.zeros(VOCABULARY, HIDDEN)
    embedding[:, : 2 * CIRCLES] = codes
    embedding[:, CONSTANT] = embedding[:, ANCHOR] = 4.0
    embedding[MASK_TOKEN] = 0.0
    embedding[MASK_TOKEN, [CONSTANT, MASK]] = 4.0
    head = torch.zeros(VOCABULARY, HIDDEN)
    head[:, : 2 * CIRCLES] = codes.roll(1, 0)
    for name, value in weights.items():
        if name.endswith("embed_tokens.weight"):
            weights[name] = embedding.clone()
        elif name == "lm_head.weight":
            weights[name] = head
        elif "o_proj" in name or "down_proj" in name:
            weights[name] = value * 0.05


def make_agreeing_draft(folder: Path, architecture: str, target_layers: list[int]) -> Path:
    """A draft for a target that `agree` has changed.

    Args:
        folder: where it goes.
        architecture: `DFLASH` or `DFLASH2`.
        target_layers: layers of the target whose outputs the draft averages.
    """
    from safetensors.torch import save_file

    write_config(folder, draft_config(architecture, target_layers))
    weights = _shared_weights(len(target_layers))
    _find_the_slot(weights, "layers.0.")
    _fetch_the_token(weights, "layers.1.", ambiguous=architecture == DFLASH2)
    if architecture == DFLASH2:
        _select_the_next_token(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _frequencies(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 1 + torch.randperm(VOCABULARY // 2 - 1, generator=generator)[:count]


def _codes(tokens: int, frequencies: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 * frequencies]: the token's point on each circle, cosine and sine in turn."""
    angles = 2 * math.pi * torch.arange(tokens)[:, None] * frequencies / VOCABULARY
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1)


def _rotation(steps: int) -> torch.Tensor:
    """[2 * READ, 2 * READ]: from the code of a token to that of the token `steps` further on."""
    angles = 2 * math.pi * steps * _frequencies(CIRCLES)[:READ] / VOCABULARY
    blocks = [
        torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
        for a in angles.tolist()
    ]
    return torch.block_diag(*blocks)


def _shared_weights(num_target_layers: int) -> dict[str, torch.Tensor]:
    """Everything but the attention: norms, no MLP, the context as the target has it."""
    passes = torch.eye(HIDDEN)
    passes[[ANCHOR, MASK]] = 0.0  # the context has neither anchors nor masks
    weights: dict[str, torch.Tensor] = {
        "fc.weight": torch.cat([passes / num_target_layers] * num_target_layers, 1),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}mlp.gate_proj.weight"] = torch.zeros(2 * HIDDEN, HIDDEN)
        weights[f"{prefix}mlp.up_proj.weight"] = torch.zeros(2 * HIDDEN, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
        weights[f"{prefix}self_attn.q_norm.weight"] = SHARPNESS * torch.ones(HEAD_SIZE)
        weights[f"{prefix}self_attn.k_norm.weight"] = torch.ones(HEAD_SIZE)
    return weights


def _keys() -> torch.Tensor:
    """[KV_HEADS, HEAD_SIZE, HIDDEN]: every token has the same key, but for its position."""
    key = torch.zeros(KV_HEADS, HEAD_SIZE, HIDDEN)
    key[:, :, CONSTANT] = _pattern(0)
    return key


def _pattern(back: int) -> torch.Tensor:
    """[HEAD_SIZE]: with this query a token sees the token `back` positions before it best."""
    angles = -back * 10000.0 ** (-torch.arange(NEAR) / (HEAD_SIZE // 2))
    pattern = torch.zeros(HEAD_SIZE)
    pattern[:NEAR] = angles.cos()
    pattern[HEAD_SIZE // 2 : HEAD_SIZE // 2 + NEAR] = angles.sin()
    return pattern


def _find_the_slot(weights: dict[str, torch.Tensor], prefix: str) -> None:
    query = torch.zeros(HEADS, HEAD_SIZE, HIDDEN)
    output = torch.zeros(HIDDEN, HEADS, HEAD_SIZE)
    for head in range(NUM_DRAFTS):
        query[head, :, CONSTANT] = _pattern(head + 1)
        output[SLOT + head, head, 0] = 4.0
    value = torch.zeros(KV_HEADS, HEAD_SIZE, HIDDEN)
    value[:, 0, ANCHOR] = 1.0
    _attention(weights, prefix, query, _keys(), value, output)


def _fetch_the_token(weights: dict[str, torch.Tensor], prefix: str, *, ambiguous: bool) -> None:
    query = torch.zeros(HEADS, HEAD_SIZE, HIDDEN)
    output = torch.zeros(HIDDEN, HEADS, HEAD_SIZE)
    for head in range(NUM_DRAFTS):
        query[head, :, SLOT + head] = 4.0 * _pattern(head + 2)
        query[head, FAR, MASK] = 1.0
        found = _rotation(head + 1)  # the target's head adds one more
        if ambiguous:
            found = 0.9 * found + _rotation(head + 1 + WRONG)
        output[: 2 * READ, head] = 4.0 * found
    value = torch.zeros(KV_HEADS, HEAD_SIZE, HIDDEN)
    value[:, :, : 2 * READ] = torch.eye(2 * READ)
    key = _keys()
    key[:, FAR, MASK] = math.sqrt(NEAR)
    _attention(weights, prefix, query, key, value, output)


def _attention(
    weights: dict[str, torch.Tensor],
    prefix: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
) -> None:
    weights[f"{prefix}self_attn.q_proj.weight"] = query.flatten(0, 1).contiguous()
    weights[f"{prefix}self_attn.k_proj.weight"] = key.flatten(0, 1).contiguous()
    weights[f"{prefix}self_attn.v_proj.weight"] = value.flatten(0, 1).contiguous()
    weights[f"{prefix}self_attn.o_proj.weight"] = output.flatten(1).contiguous()


def _select_the_next_token(weights: dict[str, torch.Tensor]) -> None:
    """A pair scores high when the second token follows the first; convolutions do nothing."""
    circles = SELECTOR["selector_rank"] // 2
    codes = _codes(VOCABULARY, _frequencies(circles))
    weights["candidate_selector.predecessor_codebook"] = 100.0 * codes.roll(-1, 0)
    weights["candidate_selector.successor_codebook"] = codes
    projection = torch.zeros(SELECTOR["selector_rank"], HIDDEN)
    projection[:, CONSTANT] = 1.0
    weights["candidate_selector.hidden_projection.weight"] = projection
    taps, groups = SELECTOR["conv_kernel_size"], HIDDEN // SELECTOR["conv_group_size"]
    for layer in range(LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            kernel = torch.zeros(2, taps, HIDDEN)
            kernel[:, 0] = 1.0
            prefix = f"layers.{layer}.{name}."
            weights[f"{prefix}base_kernel"] = kernel
            weights[f"{prefix}kernel_projection.weight"] = torch.zeros(2 * taps * groups, HIDDEN)


def answers(prompt: list[int], count: int) -> list[int]:
    """What the target says: the tokens that follow the last one.

    Raises:
        ValueError: it would come to the mask token, which is no token.
    """
    if prompt[-1] + count >= MASK_TOKEN:
        raise ValueError(f"the prompt ends with {prompt[-1]}: too close to {MASK_TOKEN}")
    return [prompt[-1] + step for step in range(1, count + 1)]


def edit(folder: Path, change: Any) -> None:
    """Change the weights of a model folder in place."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})

"""A DFlash2 draft in torch, under the names and with the arithmetic of vLLM's checkpoints.

The draft reads hidden states of the target as the keys and values of the text so far. Its queries
are a block: the last token, called the anchor, and k mask tokens, which see the text, the anchor
and each other in both directions. The state of mask i is for the i-th token after the anchor. A
small convolution runs along the block around attention and MLP, and a selector scores every
candidate beside the one chosen before it. Embedding and head are the target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

_SPREAD = 0.03  # standard deviation of the initial weights


@attrs.frozen
class DraftSizes:
    """Sizes of the draft; head size 64 is one that the draft flash operator has.

    Attributes:
        vocabulary, hidden: those of the target.
        target_layers: layers of the target whose outputs the draft reads.
        mask_token: stands for a token that is to be found; one that no text has.
        drafted: k, mask tokens of a block.
    """

    vocabulary: int
    hidden: int
    target_layers: tuple[int, ...]
    mask_token: int
    drafted: int = 3
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    inner: int = 384
    taps: int = 2
    group: int = 32
    rank: int = 32
    candidates: int = 8
    epsilon: float = 1e-5
    theta: float = 10000.0
    longest: int = 2048


class BlockConvolution(nn.Module):
    """Two convolutions along the block, whose kernels depend on the states."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.taps, self.groups = sizes.taps, sizes.hidden // sizes.group
        kernel = torch.zeros(2, sizes.taps, sizes.hidden)
        kernel[:, 0] = 1.0  # at first every state passes as it is
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = _linear(sizes.hidden, 2 * sizes.taps * self.groups)

    def kernels(self, hidden: torch.Tensor) -> torch.Tensor:
        """Kernels [2, taps, ..., block, H] from the states [..., block, H]."""
        deltas = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, self.groups))
        spread = deltas.repeat_interleave(hidden.shape[-1] // self.groups, dim=-1)
        return torch.movedim(spread + self.base_kernel, (-3, -2), (0, 1))

    def forward(self, hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Convolve [..., block, H] with a kernel [taps, ..., block, H]."""
        result = kernel[0] * hidden
        for tap in range(1, self.taps):
            shifted = functional.pad(hidden[..., :-tap, :], (0, 0, tap, 0))
            result = result + kernel[tap] * shifted
        return result


class BlockAttention(nn.Module):
    """Attention of blocks over the text before them and over themselves."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, kv_width = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
        self.q_proj = _linear(sizes.hidden, width)
        self.k_proj = _linear(sizes.hidden, kv_width)
        self.v_proj = _linear(sizes.hidden, kv_width)
        self.o_proj = _linear(width, sizes.hidden)
        self.q_norm = nn.RMSNorm(sizes.head_size, sizes.epsilon)
        self.k_norm = nn.RMSNorm(sizes.head_size, sizes.epsilon)

    def forward(
        self, blocks: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Attend.

        Args:
            blocks: [B, A, block, H], A blocks of each row.
            context: [B, S, H], normalised states of the row.
            anchors: [B, A], position of each block's anchor; it sees the states before that.
        """
        rows, count, width, _ = blocks.shape
        places = anchors[..., None] + torch.arange(width)
        text = torch.arange(context.shape[1])
        query = self._turned(self.q_norm(_heads(self.q_proj(blocks), self.sizes)), places)
        own_key, own_value = self._pair(blocks, places)
        key, value = self._pair(context, text)
        seen = text < anchors[..., None]
        share = self.sizes.heads // self.sizes.kv_heads
        query = query.unflatten(-2, (self.sizes.kv_heads, share))
        far = torch.einsum("bawgsd,btgd->bagswt", query, key)
        near = torch.einsum("bawgsd,bavgd->bagswv", query, own_key)
        far = far.masked_fill(~seen[:, :, None, None, None], float("-inf"))
        scores = torch.cat([far, near], dim=-1) * self.sizes.head_size**-0.5
        far, near = scores.softmax(-1).split([context.shape[1], width], dim=-1)
        found = torch.einsum("bagswt,btgd->bawgsd", far, value)
        found = found + torch.einsum("bagswv,bavgd->bawgsd", near, own_value)
        return self.o_proj(found.reshape(rows, count, width, -1))  # type: ignore[no-any-return]

    def _pair(
        self, states: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.k_norm(_heads(self.k_proj(states), self.sizes))
        return self._turned(key, places), _heads(self.v_proj(states), self.sizes)

    def _turned(self, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        half = self.sizes.head_size // 2
        rates = self.sizes.theta ** -(torch.arange(half) / half)
        angles = (places[..., None] * rates)[..., None, :]
        first, second = states.chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.gate_proj = _linear(sizes.hidden, sizes.inner)
        self.up_proj = _linear(sizes.hidden, sizes.inner)
        self.down_proj = _linear(sizes.inner, sizes.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Transform [..., H]."""
        inner = functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(inner)  # type: ignore[no-any-return]


class DraftLayer(nn.Module):
    """Attention and MLP, each between two block convolutions."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.self_attn = BlockAttention(sizes)
        self.mlp = GatedMlp(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.epsilon)
        self.attention_conv = BlockConvolution(sizes)
        self.mlp_conv = BlockConvolution(sizes)

    def forward(
        self, blocks: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """See `BlockAttention.forward`."""
        hidden = self.input_layernorm(blocks)
        before, after = self.attention_conv.kernels(hidden)
        hidden = self.self_attn(self.attention_conv(hidden, before), context, anchors)
        blocks = blocks + self.attention_conv(hidden, after)
        hidden = self.post_attention_layernorm(blocks)
        before, after = self.mlp_conv.kernels(hidden)
        return blocks + self.mlp_conv(self.mlp(self.mlp_conv(hidden, before)), after)


class CandidateSelector(nn.Module):
    """What a token is worth after another one, at a position with a given state."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.predecessor_codebook = _table(sizes.vocabulary, sizes.rank)
        self.successor_codebook = _table(sizes.vocabulary, sizes.rank)
        self.hidden_projection = _linear(sizes.hidden, sizes.rank)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Scores [..., V] to add to the logits, of states [..., H] after tokens [...]."""
        mixed = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return mixed @ self.successor_codebook.T


class TinyDraft(nn.Module):
    """The draft; its state_dict is the checkpoint."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = _linear(len(sizes.target_layers) * sizes.hidden, sizes.hidden)
        self.hidden_norm = nn.RMSNorm(sizes.hidden, sizes.epsilon)
        self.layers = nn.ModuleList(DraftLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, sizes.epsilon)
        self.candidate_selector = CandidateSelector(sizes)

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """States of the mask tokens.

        Args:
            embedded: [B, A, 1 + k, H], embedded anchor and masks of each block.
            states: [B, S, layers * H], what the target's layers gave for the text of the row.
            anchors: [B, A], position of each anchor.

        Returns:
            [B, A, k, H], to be multiplied with the target's head.
        """
        context = self.hidden_norm(self.fc(states))
        for layer in self.layers:
            embedded = layer(embedded, context, anchors)
        return self.norm(embedded[:, :, 1:])  # type: ignore[no-any-return]


def configuration(sizes: DraftSizes) -> dict[str, Any]:
    """The config.json that vLLM reads."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "layer_types": ["full_attention"] * sizes.layers,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.longest,
        "rms_norm_eps": sizes.epsilon,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "block_size": sizes.drafted + 1,
        "dflash_config": {
            "mask_token_id": sizes.mask_token,
            "target_layer_ids": list(sizes.target_layers),
            "causal": False,
            "conv_kernel_size": sizes.taps,
            "conv_group_size": sizes.group,
            "selector_rank": sizes.rank,
            "selector_top_k": sizes.candidates,
        },
    }


def save(draft: TinyDraft, folder: Path) -> None:
    """Write config.json and model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by its owner alone
    config = json.dumps(configuration(draft.sizes), indent=1)
    (folder / "config.json").write_text(config + "\n")


def load(folder: Path) -> TinyDraft:
    """Read what `save` wrote, in float32.

    Raises:
        RuntimeError: the weights are not those of the configuration.
    """
    config = json.loads((folder / "config.json").read_text())
    own = config["dflash_config"]
    sizes = DraftSizes(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        target_layers=tuple(own["target_layer_ids"]),
        mask_token=own["mask_token_id"],
        drafted=config["block_size"] - 1,
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        inner=config["intermediate_size"],
        taps=own["conv_kernel_size"],
        group=own["conv_group_size"],
        rank=own["selector_rank"],
        candidates=own["selector_top_k"],
        epsilon=config["rms_norm_eps"],
        theta=config["rope_theta"],
        longest=config["max_position_embeddings"],
    )
    draft = TinyDraft(sizes)
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.float()


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=_SPREAD)
    return linear


def _table(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * 0.1)


def _heads(states: torch.Tensor, sizes: DraftSizes) -> torch.Tensor:
    return states.unflatten(-1, (-1, sizes.head_size))

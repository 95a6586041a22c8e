"""The multi-token-prediction (MTP) layer of GLM and DeepSeek checkpoints, which Hugging Face skips.

From the hidden state of position t (after the final norm) and the token of t + 1 the layer predicts
the token of t + 2; its own normed output is the hidden state of the next draft step. So does
vLLM 0.30 (model_executor/models/deepseek_mtp.py); the layer is layer ``num_hidden_layers`` of the
checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.hf.quiet import quiet_loading

_OWN = {  # what an MTP layer has beside its decoder layer: name in the checkpoint, module here
    "enorm.weight": "enorm",
    "hnorm.weight": "hnorm",
    "eh_proj.weight": "eh_proj",
    "shared_head.norm.weight": "norm",
}


class MtpLayer(nn.Module):
    """One MTP layer of a glm_moe_dsa model; embedding and head are the target's.

    Args:
        config: ``GlmMoeDsaConfig`` of the target.
        layer_index: index that the decoder layer gives to its cache.
    """

    def __init__(self, config: Any, layer_index: int = 0) -> None:
        from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = glm.GlmMoeDsaRMSNorm(size, eps)
        self.hnorm = glm.GlmMoeDsaRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = glm.GlmMoeDsaDecoderLayer(mtp_config(config), layer_index)
        self.norm = glm.GlmMoeDsaRMSNorm(size, eps)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        """Normed hidden states of the following positions.

        Args:
            embedded: [B, S, H] embeddings of the tokens of t + 1; that of t = 0 counts as zeros.
            hidden: [B, S, H] hidden states of t.
            rotary: cosines and sines of the positions t.
            mask: [1, 1, S, C + S] additive, with C cached positions.
            cache: a ``DynamicCache`` of :func:`mtp_config`, or None.

        Returns:
            [B, S, H].
        """
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        out, _ = self.layer(
            self.eh_proj(joined), attention_mask=mask, position_embeddings=rotary, cache=cache
        )
        normed: torch.Tensor = self.norm(out)
        return normed


def mtp_config(config: Any) -> Any:
    """Configuration of a model that has the MTP layer alone: the last layer's kind, once."""
    data = config.to_dict()
    data["num_hidden_layers"] = 1
    for name in ("indexer_types", "layer_types", "mlp_layer_types"):
        if data.get(name):
            data[name] = data[name][-1:]
    data["first_k_dense_replace"] = 0
    alone = type(config).from_dict(data)
    alone._attn_implementation = "eager"
    alone._experts_implementation = "eager"
    return alone


def load_mtp_layer(folder: str | Path, dtype: torch.dtype = torch.float32) -> MtpLayer:
    """The MTP layer of a glm_moe_dsa checkpoint folder.

    Hugging Face renames and joins the weights of its own decoder layers while it loads them, so
    the layer is loaded as the last one of a model of one layer more.

    Raises:
        ArgumentError: the folder holds no glm_moe_dsa model with an MTP layer.
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    folder = Path(folder)
    config = _checked_config(folder)
    layers = config.num_hidden_layers
    data = config.to_dict() | {"num_hidden_layers": layers + 1}
    for name in ("indexer_types", "layer_types", "mlp_layer_types"):
        data[name] = [*data[name], data[name][-1]]
    with quiet_loading():
        model = GlmMoeDsaForCausalLM.from_pretrained(
            folder, config=GlmMoeDsaConfig.from_dict(data), dtype=dtype
        )
    mtp = MtpLayer(config).to(dtype)
    mtp.layer.load_state_dict(model.model.layers[layers].state_dict())
    _copy_own_weights(mtp, folder, f"model.layers.{layers}.")
    return mtp.eval()


def _copy_own_weights(mtp: MtpLayer, folder: Path, prefix: str) -> None:
    from safetensors import safe_open

    wanted = {prefix + stored: module for stored, module in _OWN.items()}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as weights:
            for name in wanted.keys() & set(weights.keys()):
                parameter = mtp.get_parameter(f"{wanted.pop(name)}.weight")
                parameter.data.copy_(weights.get_tensor(name))
    if wanted:
        raise ArgumentError("folder", f"{folder} without {', '.join(sorted(wanted))}", "these too")


def _checked_config(folder: Path) -> Any:
    from transformers import AutoConfig

    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ArgumentError("folder", f"{path}: {error.strerror}", "a model folder") from error
    if raw.get("model_type") != "glm_moe_dsa" or not raw.get("num_nextn_predict_layers"):
        found = f"{raw.get('model_type')}, {raw.get('num_nextn_predict_layers', 0)} MTP layers"
        raise ArgumentError("folder", found, "glm_moe_dsa with an MTP layer")
    return AutoConfig.from_pretrained(folder)

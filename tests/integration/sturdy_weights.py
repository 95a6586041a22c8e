"""Random weights of models with experts whose answers survive half precision."""

from __future__ import annotations

from typing import Any


def sturdy(model_class: Any, config: Any) -> Any:
    """A float32 model of transformers in which every token has the same experts.

    The choice of experts would jump with the last bit of a number; their weights do not.
    """
    import torch

    torch.manual_seed(0)
    model = model_class(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(2.0 * torch.arange(buffer.shape[0]))
    return model

"""What vLLM does beside the stand-in of vllm-ascend: `overlay_probe.py MODEL_FOLDER`.

Prints one line of JSON; the log goes to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def answers(config: Any) -> dict[str, Any]:
    """What the platform answers when vLLM asks for backends of layers of several kinds."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    found = {}
    dense = {"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto", "block_size": 128}
    latent = {**dense, "head_size": 576, "use_mla": True}
    quantised = {**dense, "kv_cache_dtype": "fp8"}
    for name, (backend, question) in {
        "dense": (None, dense),
        "latent": (None, latent),
        "quantised": (None, quantised),
        "named": (AttentionBackendEnum.FLASH_ATTN, dense),
    }.items():
        asked = AttentionSelectorConfig(**question)
        found[name] = current_platform.get_attn_backend_cls(backend, asked, 4)
    return found


def main(model: str) -> None:
    """Let vLLM configure an engine, and ask its platform."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    config = EngineArgs(
        model=model, dtype="float16", skip_tokenizer_init=True, max_model_len=256
    ).create_engine_config()
    cls = type(current_platform)
    with set_current_vllm_config(config):
        result = {
            "platform": f"{cls.__module__}.{cls.__qualname__}",
            "bases": [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__[1:3]],
            "worker": config.parallel_config.worker_cls,
            "extension": config.parallel_config.worker_extension_cls,
            "graphs": current_platform.get_static_graph_wrapper_cls(),
            "communicator": current_platform.get_device_communicator_cls(),
            "quantization": current_platform.supported_quantization,
            "backends": answers(config),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])

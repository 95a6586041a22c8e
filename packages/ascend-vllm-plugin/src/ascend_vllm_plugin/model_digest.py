"""A name for a model as an engine runs it, by which stored keys are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ascend_vllm_plugin.facts import draft_model_of
from ascend_vllm_plugin.kv_store import FORMAT, digest_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_SAYS_NOTHING: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Fields of a model's configuration that change no key."""

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".gguf"})

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 14
"""How many pieces of a file of weights are looked at, and how much each time."""


def model_digest(vllm_config: VllmConfig, layer_names: Iterable[str]) -> str:
    """The same for engines whose keys are interchangeable: models, types, layers, ranks.

    Args:
        vllm_config: of the engine.
        layer_names: of all layers with a cache.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    target, draft = vllm_config.model_config, draft_model_of(vllm_config.speculative_config)
    return digest_of(
        FORMAT,
        [_facts(model) for model in (target, draft) if model is not None],
        cache.cache_dtype,
        [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        sorted(layer_names),
    )


def _facts(model: ModelConfig) -> list[Any]:
    config = model.hf_config.to_dict()
    said = {name: value for name, value in config.items() if name not in _SAYS_NOTHING}
    folder = Path(model.model)
    weights = weights_digest(folder) if folder.exists() else [model.model, model.revision]
    return [said, str(model.dtype), model.quantization, weights]


def weights_digest(folder: Path) -> str:
    """Of names, sizes and samples of the files with weights, wherever the folder is.

    Args:
        folder: of the model, or its one file.
    """
    paths = [folder] if folder.is_file() else sorted(folder.iterdir())
    found = [path for path in paths if path.suffix in WEIGHT_SUFFIXES]
    return digest_of(*((path.name, path.stat().st_size, _sampled(path)) for path in found))


def _sampled(path: Path) -> str:
    """Digest of pieces from the beginning to the end of a file."""
    last = max(path.stat().st_size - _SAMPLE_BYTES, 0)
    running = hashlib.blake2b()
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(last * index // (_SAMPLES - 1))
            running.update(file.read(_SAMPLE_BYTES))
    return running.hexdigest()

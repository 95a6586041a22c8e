"""How each layer of a DeepSeek-V4 config.json compresses its keys."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from ..dsa import DsaCompression
from ..kv_plan import DsaModelShape
from .errors import ModelConfigError
from .model_config import ModelConfig

_MOST_TOKENS = 2**20


def compressions(config: ModelConfig) -> list[DsaCompression | None]:
    """Compression of each layer; None where there is the sliding window alone.

    ``layer_types`` decides, then the older ``compress_ratios``, then the pattern of the published
    models: two heavily compressed layers, then heavily compressed and sparse ones in turn.

    Raises:
        ModelConfigError: The file describes no such model, or a list or number does not fit.
    """
    if not config.use_compress:
        allowed = " or ".join(_facts()["model_types"])
        raise ModelConfigError(config.path, f"model_type {config.model_type!r}", allowed)
    known = {kind: _compression(config, kind) for kind in _facts()["layer_types"]}
    return [known[kind] for kind in _layer_types(config)]


def dsa_model_shape(config: ModelConfig) -> DsaModelShape:
    """What :func:`get_dsa_attn_kv_plan` needs of a model.

    Raises:
        ModelConfigError: The file describes no such model, or lacks a number.
    """
    layers = compressions(config)
    indexer: dict[str, int] = {}
    if any(layer is not None and layer.overlap for layer in layers):
        indexer["index_heads"] = config.number("index_n_heads")
        indexer["index_size"] = config.number("index_head_dim")
    return DsaModelShape(
        layers=layers,
        num_heads=config.num_heads,
        window=config.number("sliding_window"),
        key_size=config.head_size,
        dtype=config.dtype,
        **indexer,
    )


def _layer_types(config: ModelConfig) -> list[str]:
    known = _facts()["layer_types"]
    count = config.num_layers
    for key, kinds in (
        ("layer_types", {kind: kind for kind in known}),
        ("compress_ratios", {facts["ratio"]: kind for kind, facts in known.items()}),
    ):
        given = config.data.get(key)
        if given is None:
            continue
        fits = isinstance(given, list) and len(given) >= count
        if not fits or any(not _names(kinds, entry) for entry in given[:count]):
            allowed = f"{key}, one of {', '.join(map(str, kinds))} for each of {count} layers"
            raise ModelConfigError(config.path, f"{key} {given!r}", allowed)
        return [kinds[entry] for entry in given[:count]]
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    return [sparse if layer > 2 and layer % 2 else heavy for layer in range(count)]


def _names(kinds: Mapping[Any, str], entry: object) -> bool:
    return isinstance(entry, str | int) and not isinstance(entry, bool) and entry in kinds


def _compression(config: ModelConfig, kind: str) -> DsaCompression | None:
    facts = _facts()["layer_types"][kind]
    if not facts["ratio"]:
        return None
    found = config.data.get(facts["legacy_key"])
    if found is None:
        found = config.section("compress_rates").get(kind, facts["ratio"])
    ratio = config.whole_number(f"compress_rates {kind}", found, 2, _MOST_TOKENS)
    if not facts.get("has_indexer", False):
        return DsaCompression(ratio)
    return DsaCompression(ratio, config.number("index_topk"))


@cache
def _facts() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath("model_facts.toml").read_text("utf-8")
    facts: Mapping[str, Any] = tomllib.loads(text)["compressed"]
    return facts

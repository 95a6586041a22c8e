"""The facts of a Hugging Face config.json that decide about attention backends."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import torch

from .errors import ModelConfigError

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_PATTERN = {"F": "full", "S": "shared"}
_SLIDING = "sliding_attention"
_MOST = 2**24  # far above every model; products of three sizes still fit 64 bits with it
_MOST_LAYERS = 4096


@attrs.frozen(eq=False)
class ModelConfig:
    """One config.json.

    Attributes:
        path: The file.
        data: Its text model: ``text_config`` where the file nests it, else the whole file.
        whole: The whole file.
    """

    path: Path
    data: Mapping[str, Any]
    whole: Mapping[str, Any]

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read ``directory/config.json``.

        Raises:
            ModelConfigError: There is no such file, or it holds no JSON object.
        """
        path = directory / "config.json"
        if not path.is_file():
            what = "no such file" if directory.is_dir() else "no such directory"
            raise ModelConfigError(path, what, "the config.json of a Hugging Face model")
        try:
            whole = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:  # numbers of 4,301 digits, nested too deeply
            raise ModelConfigError(path, f"no JSON ({error})", "a JSON object") from error
        if not isinstance(whole, dict):
            raise ModelConfigError(path, f"a JSON {type(whole).__name__}", "a JSON object")
        nested = whole.get("text_config")
        return cls(path, nested if isinstance(nested, dict) else whole, whole)

    @property
    def model_type(self) -> str:
        """``model_type`` of the whole file."""
        return self._text(self.whole.get("model_type"), "model_type")

    @property
    def architecture(self) -> str | None:
        """First of ``architectures``, or None."""
        names = self.whole.get("architectures") or [None]
        if not isinstance(names, list):
            raise ModelConfigError(self.path, f"architectures {names!r}", "a list of texts")
        return None if names[0] is None else self._text(names[0], "architectures")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.number("num_hidden_layers", most=_MOST_LAYERS)

    @property
    def use_mla(self) -> bool:
        """Keys and values are cached as one latent row, or one compressed row."""
        return self.use_compress or self.data.get("kv_lora_rank") is not None

    @property
    def use_sparse(self) -> bool:
        """An indexer chooses the keys."""
        return self.use_mla and not self.use_compress and self.data.get("index_topk") is not None

    @property
    def use_compress(self) -> bool:
        """Keys are compressed."""
        return self.model_type in _facts()["compressed"]["model_types"]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.number("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Cached heads: 1 for latent rows."""
        if self.use_mla:
            return 1
        return self.number("num_key_value_heads", self.num_heads)

    @property
    def head_size(self) -> int:
        """Elements that a cached head has."""
        if self.use_mla and not self.use_compress:
            return self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
        if self.data.get("head_dim") is not None:
            return self.number("head_dim")
        size = self.number("hidden_size") // self.num_heads
        if size < 1:
            raise ModelConfigError(self.path, "no head_dim", "head_dim, or hidden_size of more")
        return size

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights, bfloat16 where the file does not say."""
        name = self.data.get("dtype") or self.data.get("torch_dtype") or self.whole.get("dtype")
        name = name or self.whole.get("torch_dtype") or "bfloat16"
        if not isinstance(name, str) or name not in _DTYPES:
            raise ModelConfigError(self.path, f"dtype {name!r}", " or ".join(_DTYPES))
        return _DTYPES[name]

    @property
    def kv_cache_dtype(self) -> str:
        """``"auto"``, or type and bits of a quantised cache."""
        scheme = self.section("quantization_config").get("kv_cache_scheme")
        if not isinstance(scheme, dict):
            return "auto"
        return f"{scheme.get('type', 'quantised')}{scheme.get('num_bits', '')}"

    @property
    def logits_soft_cap(self) -> float | None:
        """Bound that scores are squashed to, or None."""
        bound = self.data.get("attn_logit_softcapping")
        if bound is None:
            return None
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise ModelConfigError(
                self.path, f"attn_logit_softcapping {bound!r}", "a number, or null for none"
            )
        return bound

    @property
    def has_sinks(self) -> bool:
        """Every layer has learnable sinks."""
        return self.model_type in _facts()["sinks"]["model_types"]

    @property
    def layer_types(self) -> Sequence[str]:
        """Kind of each layer, in the words of the file; empty words where it does not say."""
        types = self.data.get("layer_types")
        if types is None:
            sliding = self.data.get("use_sliding_window", self.data.get("sliding_window"))
            full = self.number("max_window_layers", 0, least=0) if sliding else self.num_layers
            return [_SLIDING if layer >= full else "" for layer in range(self.num_layers)]
        if not isinstance(types, list) or len(types) != self.num_layers:
            raise ModelConfigError(self.path, "layer_types", f"a list of {self.num_layers} words")
        return [self._text(entry, "layer_types") for entry in types]

    def other_kind(self, layer: int) -> str | None:
        """What a layer is, in the words of the file, where it is no attention that we know."""
        kind = self.layer_types[layer]
        return None if self.use_compress or kind in _facts()["attention"]["layer_types"] else kind

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in keys, or None."""
        if self.use_compress:  # beside the compressed keys, in every layer
            return self.number("sliding_window")
        if self.layer_types[layer] != _SLIDING:
            return None
        return self.number("sliding_window")

    def indexer_types(self) -> Sequence[str]:
        """``"full"`` or ``"shared"`` per layer; a shared one reuses the choice of a full one.

        Source of the pattern and the schedule: transformers GlmMoeDsaConfig.
        """
        for key, letters in (("indexer_types", {}), ("index_topk_pattern", _PATTERN)):
            given = self.data.get(key)
            if given is not None:
                return self._indexer_types(key, given, letters)
        step = self.number("index_topk_freq", 1)
        skipped = self.number("index_skip_topk_offset", 2, least=0)
        places = range(self.num_layers)
        return ["shared" if max(i - skipped + 1, 0) % step else "full" for i in places]

    def _indexer_types(self, key: str, given: object, letters: Mapping[str, str]) -> Sequence[str]:
        if isinstance(given, list | str) and len(given) == self.num_layers:
            names = [letters.get(entry, entry) if isinstance(entry, str) else "" for entry in given]
            if set(names) <= set(_PATTERN.values()):
                return names
        allowed = " or ".join((*letters, *_PATTERN.values()))
        raise ModelConfigError(
            self.path, f"{key} {given!r}", f"{key}, {allowed} for each of {self.num_layers} layers"
        )

    def section(self, key: str) -> Mapping[str, Any]:
        """A nested object, empty where the file has none.

        Raises:
            ModelConfigError: The key holds something else.
        """
        value = self.whole.get(key) if self.data.get(key) is None else self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ModelConfigError(self.path, f"{key} {value!r}", f"{key}, a JSON object")
        return value

    def number(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """A whole number.

        Raises:
            ModelConfigError: The key is missing without a default, or holds something else.
        """
        value = self.data.get(key)
        return self.whole_number(key, default if value is None else value, least, most)

    def whole_number(self, key: str, value: object, least: int = 1, most: int = _MOST) -> int:
        """``value`` as the whole number that ``key`` must hold.

        Raises:
            ModelConfigError: It is something else, less than ``least`` or more than ``most``.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            found = f"no {key}" if value is None else f"{key} {value!r}"
            allowed = f"{key}, a whole number of at least {least} and at most {most}"
            raise ModelConfigError(self.path, found, allowed)
        return value

    def _text(self, value: object, key: str) -> str:
        if not isinstance(value, str):
            raise ModelConfigError(self.path, f"{key} {value!r}", f"{key}, a text")
        return value


@cache
def _facts() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath("model_facts.toml").read_text("utf-8")
    return tomllib.loads(text)

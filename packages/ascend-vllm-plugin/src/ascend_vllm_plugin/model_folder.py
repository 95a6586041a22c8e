"""Whether the models that were named can be read at all; asked before vLLM looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ascend_vllm_plugin.errors import EngineOptionError, ModelFolderError

CONFIGURATIONS: Final = ("config.json", "params.json")
"""What vLLM looks for in a folder: the configuration of transformers, or of Mistral."""


OBJECTS: Final = ("speculative_config", "additional_config", "kv_transfer_config")
"""Options of vLLM that take JSON objects, and that it reads without a look at what they are."""


def require_readable_options(arguments: object) -> None:
    """Check what the options of an engine name, of which vLLM says little when it is wrong.

    Args:
        arguments: with attributes named after vLLM's options.

    Raises:
        EngineOptionError: an option that takes a JSON object has something else.
        ModelFolderError: there is no such draft.
    """
    for name in OBJECTS:
        value = getattr(arguments, name)
        if isinstance(value, (list, str, int, float)):
            raise EngineOptionError(f"--{name.replace('_', '-')}", value, "a JSON object")
    draft = (getattr(arguments, OBJECTS[0]) or {}).get("model")
    if isinstance(draft, str):
        require_model(draft)


def require_model(model: str) -> None:
    """Check the folder of a model; what looks like a name of Hugging Face's hub is not looked at.

    Args:
        model: as vLLM takes it: a folder, a file with a model, or a name such as `owner/name`.

    Raises:
        ModelFolderError: there is no such folder, or its configuration cannot be read.
    """
    path = Path(model)
    if not model.strip():
        raise ModelFolderError(model, "it is empty")
    if path.is_file():
        return
    if path.is_dir():
        found = [path / name for name in CONFIGURATIONS if (path / name).is_file()]
        if not found:
            raise ModelFolderError(model, "it has no config.json")
        _require_object(model, found[0])
    elif _is_path(model):
        raise ModelFolderError(model, "there is no such folder")


def _is_path(model: str) -> bool:
    """Whether it cannot be a name of the hub, which has one `/` at most."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1


def _require_object(model: str, path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(model, f"its {path.name} is no JSON ({error})") from error
    if not isinstance(content, dict):
        found = type(content).__name__
        raise ModelFolderError(model, f"its {path.name} holds a {found}, not a JSON object")

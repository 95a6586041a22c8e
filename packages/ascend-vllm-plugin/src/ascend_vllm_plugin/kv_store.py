"""Keys and values of prompts in a folder: one safetensors file for each prompt and rank.

A file is named after what its rows follow from: the model, everything else that changes them, and
the tokens. Another model, or another draft, looks for other names and finds nothing. Inside, each
cache of the model has the rows of all tokens, `[tokens, heads, row]`, whatever block size the
engine had; the header repeats the name and has a checksum of the tensors. A file appears at once
or not at all, and one that was cut, changed or renamed is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_vllm_plugin.errors import ConnectorSettingError, StoredKeysError
from ascend_vllm_plugin.files import replacing

if TYPE_CHECKING:
    import torch

FORMAT: Final = "ascend-vllm-keys-1"

FOLDER_SETTING: Final = "shared_storage_path"
"""Key of `kv_connector_extra_config` that names the folder, as for vLLM's example connector."""

REFUSED: Final = ".refused"
"""Appended to the name of a file that turned out to be damaged."""

_DIGEST_BYTES: Final = 20


def store_folder(extra_config: Mapping[str, Any]) -> Path:
    """The folder that a connector was given.

    Args:
        extra_config: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

    Raises:
        ConnectorSettingError: there is none, it is no folder, or there are unknown settings.
    """
    unknown = sorted(set(extra_config) - {FOLDER_SETTING})
    if unknown:
        allowed = f"no setting but {FOLDER_SETTING}"
        raise ConnectorSettingError(unknown[0], extra_config[unknown[0]], allowed)
    value = extra_config.get(FOLDER_SETTING)
    if not isinstance(value, str) or not Path(value).is_dir():
        raise ConnectorSettingError(FOLDER_SETTING, value, "a folder that exists")
    return Path(value)


def digest_of(*parts: object) -> str:
    """A name for data that JSON can hold, sets and other values by their text; equal for equals."""

    def plain(value: object) -> object:
        return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)

    text = json.dumps(parts, sort_keys=True, default=plain)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def prefix_digests(seed: str, tokens: Sequence[int], step: int) -> list[str]:
    """Names of the prefixes of 1, 2, 3 ... times `step` tokens.

    Args:
        seed: what the keys depend on beside the tokens.
        tokens: of the prompt.
        step: tokens of a block; the name of a prefix is the same with every step.
    """
    running = hashlib.blake2b(seed.encode(), digest_size=_DIGEST_BYTES)
    names = []
    for end in range(step, len(tokens) + 1, step):
        block = tokens[end - step : end]
        running.update(b"".join(token.to_bytes(8, "little", signed=True) for token in block))
        names.append(running.hexdigest())
    return names


@attrs.frozen
class StoredPrompt:
    """A prompt in the store.

    Attributes:
        name: of `prefix_digests`.
        tokens: how many tokens have rows.
        model: digest of the model and of all that is the same for every prompt.
    """

    name: str
    tokens: int
    model: str

    def header(self) -> dict[str, str]:
        """What a file of this prompt says of itself."""
        fields = {"model": self.model, "prompt": self.name, "tokens": str(self.tokens)}
        return {"format": FORMAT, **fields}


class KeyStore:
    """The files of one folder.

    Args:
        folder: where they are.
        ranks: processes that have a part of every prompt each.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.ranks = ranks

    def path(self, name: str, rank: int) -> Path:
        """File of one rank's part of a prompt."""
        return self.folder / f"{name}.rank{rank}of{self.ranks}.safetensors"

    def find(self, model: str, names: Sequence[str], step: int) -> StoredPrompt | None:
        """The longest stored prefix.

        Args:
            model: see `StoredPrompt`.
            names: of `prefix_digests`.
            step: that they were made with.

        Raises:
            StoredKeysError: the longest one is cut or another's.
        """
        for count in range(len(names), 0, -1):
            prompt = StoredPrompt(names[count - 1], count * step, model)
            if self.holds(prompt):
                return prompt
        return None

    def holds(self, prompt: StoredPrompt) -> bool:
        """Whether the parts of all ranks are there, as far as headers and lengths tell.

        Raises:
            StoredKeysError: one of them is cut or another's.
        """
        paths = [self.path(prompt.name, rank) for rank in range(self.ranks)]
        if not all(path.exists() for path in paths):
            return False
        for path in paths:
            with _opened(path, prompt):
                pass
        return True

    def write(self, prompt: StoredPrompt, rank: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Store a rank's part.

        Args:
            prompt: whose rows they are.
            rank: of this process.
            rows: name of the layer -> [tokens, heads, row].

        Raises:
            OSError, safetensors.SafetensorError: the folder takes no file.
        """
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous().cpu() for name, tensor in rows.items()}
        header = prompt.header() | {"checksum": _checksum(tensors)}
        with replacing(self.path(prompt.name, rank)) as temporary:
            save_file(tensors, temporary, metadata=header)

    def read(self, prompt: StoredPrompt, rank: int) -> dict[str, torch.Tensor]:
        """The rows of a rank's part, whose checksum holds.

        Raises:
            StoredKeysError: there is no such file, or it is damaged.
        """
        path = self.path(prompt.name, rank)
        with _opened(path, prompt) as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            checksum = opened.metadata().get("checksum")
        if checksum != _checksum(tensors):
            raise StoredKeysError(str(path), "its tensors are not those that were written")
        return tensors

    def put_aside(self, prompt: StoredPrompt, rank: int) -> None:
        """Rename a damaged part, so that nobody finds it again and it can be looked at.

        Raises:
            OSError: this user may not.
        """
        path = self.path(prompt.name, rank)
        path.replace(path.with_name(path.name + REFUSED))


@contextmanager
def _opened(path: Path, prompt: StoredPrompt) -> Iterator[Any]:
    """A file of a prompt; safetensors refuses one that is shorter than its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            found = opened.metadata() or {}
            for field, expected in prompt.header().items():
                if found.get(field) != expected:
                    said = f"{field} is {found.get(field)!r}, expected {expected!r}"
                    raise StoredKeysError(str(path), said)
            yield opened
    except (OSError, SafetensorError) as error:
        raise StoredKeysError(str(path), str(error)) from error


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, types, shapes and bytes."""
    import torch

    running = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        running.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        running.update(tensor.view(torch.uint8).numpy().data)
    return running.hexdigest()

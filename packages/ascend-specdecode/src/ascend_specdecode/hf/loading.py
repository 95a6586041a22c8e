"""Reading a Hugging Face model folder for use as a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.hf.cached_target import CachedTarget
from ascend_specdecode.hf.paged_target import PagedTarget
from ascend_specdecode.hf.quiet import quiet_loading
from ascend_specdecode.hf.sparse_target import SparseTarget


@attrs.frozen(eq=False)
class LoadedModel:
    """A model folder in memory.

    Attributes:
        folder: where it came from.
        model: ``AutoModelForCausalLM``, eager attention, evaluation mode.
        tokenizer: ``AutoTokenizer``.
    """

    folder: Path
    model: Any
    tokenizer: Any

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        found = self.model.generation_config.eos_token_id
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Token ids of a text, or of a chat that it starts.

        Raises:
            ArgumentError: the text has no token, or ``chat`` and there is no chat template.
        """
        if chat and not self.tokenizer.chat_template:
            raise ArgumentError("chat", f"{self.folder} without a chat template", "a chat model")
        if chat:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        tokens: list[int] = self.tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if not tokens:
            raise ArgumentError("prompt", repr(text), "a text of at least 1 token")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load model and tokenizer from a local folder; nothing is downloaded.

    Raises:
        ArgumentError: the folder has no config.json.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ArgumentError("folder", f"{path} without config.json", "a Hugging Face model folder")
    with quiet_loading():
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return LoadedModel(path, model.eval(), tokenizer)


def load_target(
    loaded: LoadedModel, num_tokens: int = 8192, *, hidden_states: bool = False
) -> PagedTarget | SparseTarget | CachedTarget:
    """The target that fits a model: through our backends where they take it, else cached.

    The first two change the model that they are given.
    """
    if SparseTarget.takes(loaded.model.config):
        return SparseTarget(loaded.model, num_tokens, hidden_states=hidden_states)
    if getattr(loaded.model.config, "kv_lora_rank", None) is not None:
        return CachedTarget(loaded.model, hidden_states=hidden_states)
    return PagedTarget(loaded.model, num_tokens, hidden_states=hidden_states)

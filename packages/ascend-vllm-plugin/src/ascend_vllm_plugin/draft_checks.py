"""Whether drafts fit their target and their engine, asked before any weight is loaded.

vLLM finds some of these out when it loads or first runs the draft, and others never: a block of
drafts that is wider than its buffers writes past them, and a draft with another vocabulary drafts
other tokens than it means.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ascend_attn_ops import Refusal
from ascend_vllm_plugin import compat
from ascend_vllm_plugin.errors import DraftRefusedError
from ascend_vllm_plugin.facts import draft_model_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHARED_VOCABULARY = frozenset({"dflash", "dspark", "eagle", "eagle3", "mtp"})
"""Methods of vLLM whose drafts are fed the target's token ids and hidden states."""

_BLOCK = "vllm v1/spec_decode/dflash.py: one anchor and k masks per request"
_IDS = "vllm v1/spec_decode/llm_base_proposer.py: drafts get the target's token ids"
_SELECTOR = "vllm model_executor/models/qwen3_dflash2.py"


@attrs.frozen
class DraftAndEngine:
    """What the rules read.

    Attributes:
        k: `num_speculative_tokens`.
        method: vLLM's name of the way of drafting.
        draft: the draft's configuration.
        target_vocabulary: token ids of the target.
        target_layers: layers of the target.
        tensors: names in the draft's checkpoint; None where it is not a local folder.
        config: everything else.
    """

    k: int
    method: str
    draft: Any
    target_vocabulary: int
    target_layers: int
    tensors: frozenset[str] | None
    config: VllmConfig

    @property
    def is_block_draft(self) -> bool:
        """Whether all k tokens are drafted at once, in a block of masks."""
        return self.method == "dflash"

    @property
    def is_dflash2(self) -> bool:
        """Whether the draft selects among candidates."""
        architectures = getattr(self.draft, "architectures", None) or []
        return compat.DFLASH2_ARCHITECTURE in architectures

    def option(self, name: str) -> Any:
        """A key of `dflash_config`, else of the configuration itself; None without."""
        options = getattr(self.draft, "dflash_config", None) or {}
        return options.get(name, getattr(self.draft, name, None))


def require_fitting_draft(vllm_config: VllmConfig) -> None:
    """Check the drafts of a configuration; there is nothing to check without any.

    Raises:
        DraftRefusedError: they do not fit; the message has every rule that is broken.
    """
    speculative, subject = vllm_config.speculative_config, subject_of(vllm_config)
    if speculative is None:
        return
    found = [] if subject is None else [rule(subject) for rule in RULES]
    found.append(_length(vllm_config, speculative.num_speculative_tokens))
    refusals = [refusal for refusal in found if refusal is not None]
    if refusals:
        raise DraftRefusedError(str(speculative.model or speculative.method), refusals)


def subject_of(vllm_config: VllmConfig) -> DraftAndEngine | None:
    """What the rules read of a configuration; None without a draft that shares the vocabulary."""
    speculative = vllm_config.speculative_config
    draft = draft_model_of(speculative)
    if speculative is None or draft is None or speculative.method not in SHARED_VOCABULARY:
        return None
    target, own = vllm_config.model_config, draft.hf_config
    return DraftAndEngine(
        k=int(speculative.num_speculative_tokens),
        method=str(speculative.method),
        draft=own if hasattr(own, "vocab_size") else draft.hf_text_config,
        target_vocabulary=target.get_vocab_size(),
        target_layers=target.get_total_num_hidden_layers(),
        tensors=tensor_names(Path(draft.model)),
        config=vllm_config,
    )


def tensor_names(folder: Path) -> frozenset[str] | None:
    """Names of the tensors in a folder's safetensors files; None when there are none.

    Only the headers are read, no weight.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
            names.update(opened.keys())
    return frozenset(names)


def _vocabulary(subject: DraftAndEngine) -> Refusal | None:
    found, wanted = subject.draft.vocab_size, subject.target_vocabulary
    if found == wanted:
        return None
    return _refusal("vocab_size", found, f"{wanted}, as the target has", _IDS)


def _output_vocabulary(subject: DraftAndEngine) -> Refusal | None:
    """A smaller output vocabulary needs the map to the target's."""
    found, wanted = getattr(subject.draft, "draft_vocab_size", None), subject.target_vocabulary
    if found is None or found == wanted:
        return None
    if subject.is_dflash2:
        return _refusal("draft_vocab_size", found, f"{wanted}: candidates are token ids", _SELECTOR)
    mapped = subject.tensors is None or any("d2t" in name for name in subject.tensors)
    if found < wanted and mapped:
        return None
    allowed = f"at most {wanted}, with a tensor d2t in the checkpoint when it is less"
    said = found if mapped else f"{found} without d2t"
    return _refusal("draft_vocab_size", said, allowed, "vllm qwen3_dflash.py, llama_eagle3.py")


def _mask_token(subject: DraftAndEngine) -> Refusal | None:
    if not subject.is_block_draft:
        return None
    found, size = subject.option("mask_token_id"), subject.draft.vocab_size
    if isinstance(found, int) and 0 <= found < size:
        return None
    return _refusal("mask_token_id", found, f"0 to {size - 1}, a row of the embedding", _BLOCK)


def _target_layers(subject: DraftAndEngine) -> Refusal | None:
    if not subject.is_block_draft:
        return None
    found = subject.option("target_layer_ids") or []
    last = subject.target_layers - 1
    if all(isinstance(layer, int) and 0 <= layer <= last for layer in found):
        return None
    return _refusal(
        "target_layer_ids", found, f"layers 0 to {last} of the target", "vllm eagle3_utils.py"
    )


def _block_size(subject: DraftAndEngine) -> Refusal | None:
    """A draft is trained for blocks of one size."""
    size = getattr(subject.draft, "block_size", None)
    if not subject.is_block_draft or size is None or subject.k < size:
        return None
    allowed = f"at most {size - 1}: the draft's block_size is {size}, one of them the anchor"
    return _refusal("num_speculative_tokens", subject.k, allowed, _BLOCK)


def _length(vllm_config: VllmConfig, k: int | None) -> Refusal | None:
    """Holds for every way of drafting, also without a model."""
    longest = vllm_config.model_config.max_model_len
    if k is None or k + 1 < longest:
        return None
    allowed = f"at most {longest - 2}: max_model_len is {longest}"
    return _refusal("num_speculative_tokens", k, allowed, "vllm v1/core/sched/scheduler.py")


def _buffers(subject: DraftAndEngine) -> Refusal | None:
    """The drafter's buffers are as long as a step may be."""
    scheduler = subject.config.scheduler_config
    room = scheduler.max_num_batched_tokens // scheduler.max_num_seqs
    if not subject.is_block_draft or subject.k < room:
        return None
    allowed = (
        f"at most {room - 1}: {scheduler.max_num_seqs} requests (max_num_seqs) of 1 + k tokens "
        f"must fit into {scheduler.max_num_batched_tokens} (max_num_batched_tokens)"
    )
    return _refusal("num_speculative_tokens", subject.k, allowed, _BLOCK)


def _schedule(subject: DraftAndEngine) -> Refusal | None:
    """Convolutions of DFlash2 count positions inside blocks of one size."""
    speculative = subject.config.speculative_config
    found = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    if found is None or not subject.is_dflash2:
        return None
    return _refusal(
        "num_speculative_tokens_per_batch_size", found, "None for a DFlash2 draft", _SELECTOR
    )


def _candidates(subject: DraftAndEngine) -> Refusal | None:
    if not subject.is_dflash2:
        return None
    found, size = subject.option("selector_top_k"), subject.draft.vocab_size
    if isinstance(found, int) and 1 <= found <= size:
        return None
    return _refusal("selector_top_k", found, f"1 to {size}, the vocabulary", _SELECTOR)


RULES: tuple[Callable[[DraftAndEngine], Refusal | None], ...] = (
    _vocabulary,
    _output_vocabulary,
    _mask_token,
    _target_layers,
    _block_size,
    _buffers,
    _schedule,
    _candidates,
)
"""Each gives its refusal, or None where it does not apply or holds."""


def _refusal(parameter: str, found: object, allowed: str, source: str) -> Refusal:
    return Refusal(f"draft.{parameter}", parameter, str(found), allowed, source)

"""The rules for drafts: what each refuses, and the last value that it takes.

That vLLM stops with their messages is in `test_draft_gate.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_models import DFLASH, DFLASH2, VOCABULARY, draft_config
from safetensors.torch import save_file

from ascend_vllm_plugin import DraftRefusedError
from ascend_vllm_plugin.draft_checks import require_fitting_draft, tensor_names

K = 4
LAYERS_OF_THE_TARGET = 3


def configuration(
    draft: dict[str, Any] | None = None,
    *,
    architecture: str = DFLASH,
    folder: Path = Path("/nowhere"),
    speculative: dict[str, Any] | None = None,
    max_model_len: int = 512,
    max_num_batched_tokens: int = 64,
) -> Any:
    """The parts of vLLM's configuration that the rules read."""
    hf_config = SimpleNamespace(**draft_config(architecture, [0, 1]) | (draft or {}))
    fields = {
        "method": "dflash",
        "model": "the draft",
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": None,
        "target_model_config": object(),
        "draft_model_config": SimpleNamespace(hf_config=hf_config, model=str(folder)),
        **(speculative or {}),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_vocab_size=lambda: VOCABULARY,
            get_total_num_hidden_layers=lambda: LAYERS_OF_THE_TARGET,
            max_model_len=max_model_len,
        ),
        speculative_config=SimpleNamespace(**fields),
        scheduler_config=SimpleNamespace(
            max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens
        ),
    )


def dflash(**options: Any) -> dict[str, Any]:
    """A draft with changed `dflash_config`."""
    return {"dflash_config": draft_config(DFLASH2, [0, 1])["dflash_config"] | options}


@pytest.mark.parametrize("architecture", [DFLASH, DFLASH2])
def test_a_fitting_draft_is_taken(architecture: str) -> None:
    require_fitting_draft(configuration(architecture=architecture))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"draft": {"vocab_size": 600}},
            "vocab_size: found 600; allowed: 512, as the target has [draft.vocab_size;",
        ),
        (
            {"draft": {"draft_vocab_size": 600}},
            "draft_vocab_size: found 600; allowed: at most 512, with a tensor d2t",
        ),
        (
            {"draft": {"draft_vocab_size": 256}, "architecture": DFLASH2},
            "draft_vocab_size: found 256; allowed: 512: candidates are token ids",
        ),
        (
            {"draft": dflash(mask_token_id=512)},
            "mask_token_id: found 512; allowed: 0 to 511, a row of the embedding",
        ),
        (
            {"draft": dflash(mask_token_id=None)},
            "mask_token_id: found None; allowed: 0 to 511, a row of the embedding",
        ),
        (
            {"draft": dflash(target_layer_ids=[0, 3])},
            "target_layer_ids: found [0, 3]; allowed: layers 0 to 2 of the target",
        ),
        (
            {"draft": {"block_size": 4}},
            "num_speculative_tokens: found 4; allowed: at most 3: the draft's block_size is 4",
        ),
        (
            {"max_model_len": 5},
            "num_speculative_tokens: found 4; allowed: at most 3: max_model_len is 5",
        ),
        (
            {"max_num_batched_tokens": 39},
            "num_speculative_tokens: found 4; allowed: at most 3: 8 requests (max_num_seqs) of "
            "1 + k tokens must fit into 39 (max_num_batched_tokens)",
        ),
        (
            {
                "architecture": DFLASH2,
                "speculative": {"num_speculative_tokens_per_batch_size": [(1, 8, 2)]},
            },
            "num_speculative_tokens_per_batch_size: found [(1, 8, 2)]; allowed: None for a DFlash2",
        ),
        (
            {"architecture": DFLASH2, "draft": dflash(selector_top_k=0)},
            "selector_top_k: found 0; allowed: 1 to 512, the vocabulary",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_with_the_rule(
    changes: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(DraftRefusedError) as raised:
        require_fitting_draft(configuration(**changes))
    assert "the draft the draft does not fit:" in str(raised.value)
    assert refusal in str(raised.value)
    assert len(raised.value.refusals) == 1
    assert raised.value.refusals[0].source


@pytest.mark.parametrize(
    "changes",
    [
        {"draft": {"block_size": 5}},
        {"draft": {"block_size": None}},
        {"max_model_len": 6},
        {"max_num_batched_tokens": 40},
        {"draft": dflash(target_layer_ids=[0, 2])},
        {"speculative": {"num_speculative_tokens_per_batch_size": [(1, 8, 2)]}},
    ],
)
def test_the_last_value_that_fits_is_taken(changes: dict[str, Any]) -> None:
    require_fitting_draft(configuration(**changes))


def test_every_broken_rule_is_named() -> None:
    with pytest.raises(DraftRefusedError) as raised:
        require_fitting_draft(configuration({"vocab_size": 600, "block_size": 2}))
    assert [refusal.parameter for refusal in raised.value.refusals] == [
        "vocab_size",
        "num_speculative_tokens",
    ]


def test_a_smaller_output_vocabulary_needs_its_map(tmp_path: Path) -> None:
    config = configuration({"draft_vocab_size": 256}, folder=tmp_path)
    require_fitting_draft(config)  # without a checkpoint nobody can tell
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(DraftRefusedError, match="found 256 without d2t"):
        require_fitting_draft(config)
    save_file({"d2t": torch.zeros(256)}, tmp_path / "model-2.safetensors")
    assert tensor_names(tmp_path) == {"fc.weight", "d2t"}
    require_fitting_draft(config)


@pytest.mark.parametrize("method", ["draft_model", "medusa", "custom_class"])
def test_drafts_with_a_vocabulary_of_their_own_are_not_judged(method: str) -> None:
    require_fitting_draft(configuration({"vocab_size": 500}, speculative={"method": method}))


@pytest.mark.parametrize("method", ["ngram", "custom_class", "draft_model"])
def test_a_model_has_room_for_the_drafts_of_every_method(method: str) -> None:
    chosen = {"method": method, "model": None, "draft_model_config": None}
    require_fitting_draft(configuration(speculative=chosen, max_model_len=6))
    with pytest.raises(DraftRefusedError, match=f"the draft {method} does not fit:\n.*at most 3:"):
        require_fitting_draft(configuration(speculative=chosen, max_model_len=5))


def test_no_draft_is_no_problem() -> None:
    config = configuration()
    config.speculative_config.draft_model_config = config.speculative_config.target_model_config
    require_fitting_draft(config)
    config.speculative_config = None
    require_fitting_draft(config)

"""The draft-verify engine on the tiny trained GLM: every kind of drafter, mode and k, same tokens.

What they are compared with is transformers' eager attention on the same weights, without a cache.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import REPOSITORY
from specdecode_runs import argmax_after, eager_model, generate

from ascend_specdecode import (
    ArgumentError,
    Drafter,
    FirstDrafter,
    HiddenStateDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    RaceDrafter,
    SuffixDrafter,
)
from ascend_specdecode.cli import main
from ascend_specdecode.hf import (
    CachedTarget,
    CausalDraftModel,
    LoadedModel,
    MtpLayer,
    MtpModel,
    load_model,
    load_mtp_layer,
    load_target,
)

FOLDER = REPOSITORY / "assets" / "tiny_glm"
NUM_PROMPTS, NUM_TOKENS = 16, 14


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def layer() -> Any:
    return load_mtp_layer(FOLDER)


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel) -> list[list[int]]:
    """The beginnings of sixteen topics of the language reference, 5 to 80 tokens."""
    topics = sorted(pydoc_data.topics.topics.values())[:NUM_PROMPTS]
    assert len(topics) == NUM_PROMPTS
    return [loaded.encode(text)[: 5 + 5 * row] for row, text in enumerate(topics)]


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel, texts: list[list[int]]) -> list[list[int]]:
    target = load_target(loaded)
    return generate(target, None, texts, NUM_TOKENS, num_speculative_tokens=0)[0]


def mtp(loaded: LoadedModel, layer: Any) -> Drafter:
    return HiddenStateDrafter(MtpModel(loaded.model, layer))


DRAFTERS: dict[str, Callable[[LoadedModel, Any], Drafter]] = {
    "mtp": mtp,
    "n-gram": lambda *_: PromptLookupDrafter(),
    "suffix": lambda *_: SuffixDrafter(),
    "itself": lambda loaded, _: ModelDrafter(CausalDraftModel(loaded.model)),
    "first": lambda *both: FirstDrafter(SuffixDrafter(), mtp(*both)),
    "race": lambda *both: RaceDrafter(PromptLookupDrafter(), mtp(*both)),
}
MODES, BACKENDS = ("lockstep", "pipelined"), ("asyncio", "trio")
CASES = [("mtp", k, MODES[k % 2], BACKENDS[k // 2 % 2]) for k in range(1, 9)]
CASES += [("mtp", 3, "lockstep", "trio"), ("mtp", 4, "pipelined", "asyncio")]
CASES += [
    (name, k, mode, BACKENDS[k % 2])
    for name in ("n-gram", "suffix", "first", "race")
    for k, mode in ((2, "lockstep"), (7, "pipelined"))
]
CASES += [("itself", 3, "lockstep", "asyncio"), ("itself", 5, "pipelined", "trio")]


def test_plain_decoding_is_the_greedy_output_of_transformers(
    texts: list[list[int]], plain: list[list[int]]
) -> None:
    reference = eager_model(FOLDER)
    for prompt, tokens in zip(texts, plain, strict=True):
        assert argmax_after(reference, prompt, tokens) == tokens
    assert argmax_after(reference, texts[0][:-1], plain[0]) != plain[0]  # it would notice


@pytest.mark.parametrize(("name", "k", "mode", "backend"), CASES)
def test_drafts_change_nothing(
    name: str,
    k: int,
    mode: str,
    backend: str,
    loaded: LoadedModel,
    layer: Any,
    texts: list[list[int]],
    plain: list[list[int]],
) -> None:
    target = CachedTarget(loaded.model, hidden_states=True)
    tokens, counted = generate(
        target,
        DRAFTERS[name](loaded, layer),
        texts,
        NUM_TOKENS,
        backend=backend,
        num_speculative_tokens=k,
        mode=mode,
        max_num_batched_tokens=256,
        prefill_chunk=32,  # the longer prompts take several steps
    )
    assert tokens == plain
    assert not target.sequences
    assert counted.drafts > 0
    if name == "itself":  # a draft that always agrees
        assert counted.accepted == counted.drafted
    if name == "mtp":  # it was trained for this
        assert counted.acceptance_per_position()[0] > 0.5


def test_control_a_draft_layer_that_is_not_trained_guesses_little(
    loaded: LoadedModel, texts: list[list[int]], plain: list[list[int]]
) -> None:
    torch.manual_seed(0)
    untrained = MtpLayer(loaded.model.config)
    with torch.no_grad():  # experts are made without values
        for parameter in untrained.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.03)
    target = CachedTarget(loaded.model, hidden_states=True)
    drafter = mtp(loaded, untrained)
    tokens, counted = generate(target, drafter, texts, NUM_TOKENS, num_speculative_tokens=1)
    assert tokens == plain
    assert counted.acceptance_per_position()[0] < 0.2


def test_a_target_without_hidden_states_is_refused(
    loaded: LoadedModel, layer: Any, texts: list[list[int]], plain: list[list[int]]
) -> None:
    target = CachedTarget(loaded.model)
    tokens, counted = generate(target, mtp(loaded, layer), texts[:2], 8, num_speculative_tokens=2)
    assert tokens == [row[:8] for row in plain[:2]]  # plain decoding goes on
    assert counted.draft_errors > 0


def test_the_record_of_the_training_belongs_to_the_weights() -> None:
    record = json.loads((FOLDER / "training_record.json").read_text())
    assert record["history"][-1]["step"] == record["steps"]
    assert record["validation_loss"] < 2.65
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    assert size < 8e6


def test_a_folder_without_an_mtp_layer_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ArgumentError, match="llama, 0 MTP layers"):
        load_mtp_layer(tmp_path)
    with pytest.raises(ArgumentError, match=r"without config\.json"):
        load_model(tmp_path / "missing")


def test_the_command_line_runs_and_reports(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the report extra installs matplotlib")
    trace, out = tmp_path / "run.json", tmp_path / "report"
    options = ["--drafter", "mtp", "--k", "3", "--max-new-tokens", "24", "--trace", str(trace)]
    prompts = ["--prompt", "The import statement", "--prompt", "Objects are"]
    assert main(["run", str(FOLDER), *options, *prompts, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_as_without_drafts"]
    assert all(re.search(r"[a-z]{3,}", text) for text in found["texts"])
    assert found["summary"]["speed_up"] > 0
    assert found["summary"]["acceptance_length"] > 1
    assert main(["report", str(trace), "--out", str(out)]) == 0
    assert (out / "report.html").is_file()
    assert main(["run", str(FOLDER), "--prompts", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err

"""The draft-verify engine on the tiny trained GLM: every kind of drafter, mode and k, same tokens.

What they are compared with is transformers' eager attention on the same weights, without a cache.
The whole product of drafters, modes, k and mixes of requests is ``specdecode-matrix``.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from typing import Any

import anyio
import attrs
import pytest
import specdecode_matrix as matrix
import torch
from engines import REPOSITORY, run_python
from specdecode_runs import argmax_after, generate

from ascend_specdecode import (
    ArgumentError,
    Drafter,
    FirstDrafter,
    HiddenStateDrafter,
    PromptLookupDrafter,
    SuffixDrafter,
    TreeOfDrafts,
    run_command,
)
from ascend_specdecode.cli import main
from ascend_specdecode.hf import (
    CachedTarget,
    LoadedModel,
    MtpLayer,
    MtpModel,
    PagedTarget,
    SparseTarget,
    load_model,
    load_mtp_layer,
    load_target,
)

FOLDER = REPOSITORY / "assets" / "tiny_glm"
NUM_TOKENS = 14


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def layer() -> Any:
    return load_mtp_layer(FOLDER)


@pytest.fixture(scope="module")
def subject() -> matrix.Subject:
    return matrix.tiny_glm_subject(NUM_TOKENS)


@pytest.fixture(scope="module")
def texts(subject: matrix.Subject) -> list[list[int]]:
    return [list(prompt) for prompt in subject.prompts]


@pytest.fixture(scope="module")
def plain(subject: matrix.Subject) -> list[list[int]]:
    return [list(tokens) for tokens in subject.plain]


def mtp(loaded: LoadedModel, layer: Any) -> Drafter:
    return HiddenStateDrafter(MtpModel(loaded.model, layer))


def test_plain_decoding_is_the_greedy_output_of_transformers(
    subject: matrix.Subject, texts: list[list[int]], plain: list[list[int]]
) -> None:
    assert [len(prompt) for prompt in texts] == list(range(5, 85, 5))
    for prompt, tokens in zip(texts, plain, strict=True):
        assert argmax_after(subject.reference, prompt, tokens) == tokens
    assert argmax_after(subject.reference, texts[0][:-1], plain[0]) != plain[0]  # it would notice


BATCHES = list(itertools.product(matrix.MODES, matrix.MIXES))


def test_every_drafter_meets_every_k(subject: matrix.Subject) -> None:
    batches = [matrix.pairs_of(subject, number) for number in range(len(BATCHES))]
    met = {pair for batch in batches for pair in batch}
    assert met == {(name, k) for name in subject.drafters for k in range(9)}


def test_the_matrix_has_every_combination_once(subject: matrix.Subject) -> None:
    """Those of ``specdecode-matrix``; its first quarter has every drafter, mode and k once."""
    found = matrix.combinations(subject)
    first = found[: len(found) // len(matrix.MIXES)]
    wanted = set(itertools.product(subject.drafters, matrix.MODES, range(1, 9)))
    assert {(one.drafter, one.mode, one.k) for one in first if one.k} == wanted
    assert len({str(one) for one in found}) == len(found) == 4 * (len(wanted) + 2)


def assert_unchanged(found: matrix.Outcome, subject: matrix.Subject) -> None:
    assert found.tokens == subject.plain
    assert not found.leaked
    assert found.statistics.draft_errors == 0
    assert found.statistics.acceptance_length > 1.5


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_drafts_change_nothing(number: int, subject: matrix.Subject) -> None:
    found = matrix.run_batch(subject, number, *BATCHES[number])
    assert_unchanged(found, subject)


@pytest.fixture(scope="module")
def sparse(subject: matrix.Subject) -> matrix.Subject:
    """The same over our indexer and sparse latent backend; no trees."""
    target = SparseTarget(load_model(FOLDER).model, hidden_states=True)
    chains = {
        name: make
        for name, make in subject.drafters.items()
        if name not in ("branches", "tree of drafts")
    }
    return attrs.evolve(subject, make_target=lambda: target, drafters=chains)


# Each mix once and each mode twice.
SPARSE = list(zip(matrix.MODES * 2, matrix.MIXES, strict=True))


@pytest.mark.parametrize("number", range(len(SPARSE)))
def test_drafts_change_nothing_over_our_sparse_backend(number: int, sparse: matrix.Subject) -> None:
    found = matrix.run_batch(sparse, number, *SPARSE[number])
    assert_unchanged(found, sparse)


def test_control_another_scale_in_our_sparse_backend_gives_other_tokens(
    sparse: matrix.Subject,
) -> None:
    target = SparseTarget(load_model(FOLDER).model)
    for layer in target._model.model.layers:
        layer.self_attn.forward._impl.scale *= 0.5
    tokens, _ = generate(target, None, sparse.prompts, 6, num_speculative_tokens=0)
    assert tokens != [row[:6] for row in sparse.plain]


def test_the_sparse_backend_takes_what_its_operators_take(loaded: LoadedModel) -> None:
    assert isinstance(load_target(load_model(FOLDER)), SparseTarget)
    config = copy.deepcopy(loaded.model.config)
    config.index_head_dim = 64
    assert not SparseTarget.takes(config)
    with pytest.raises(ArgumentError, match="use SparseTarget or CachedTarget"):
        PagedTarget(loaded.model)
    changed = copy.copy(loaded.model)
    changed.config = config
    with pytest.raises(ArgumentError, match=r"found glm_moe_dsa with .*allowed glm_moe_dsa"):
        SparseTarget(changed)


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"layer_types": ["full_attention"] * 3}, True),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, False),
        ({"layer_types": ["linear_attention"] * 3}, False),
        ({"layer_types": None, "sliding_window": None}, True),
        ({"layer_types": None, "sliding_window": 64}, False),
    ],
)
def test_a_layer_with_a_window_of_its_own_takes_no_trees(
    changes: dict[str, Any], takes: bool, loaded: LoadedModel
) -> None:
    changed = copy.copy(loaded.model)
    changed.config = copy.deepcopy(loaded.model.config)
    for name, value in changes.items():
        changed.config.__dict__[name] = value
    assert CachedTarget(changed).scores_trees is takes


SINGLE = [("hidden states", 3, "lockstep"), ("model", 5, "pipelined"), ("branches", 8, "lockstep")]


@pytest.mark.parametrize(("name", "k", "mode"), SINGLE)
def test_one_drafter_for_all(name: str, k: int, mode: str, subject: matrix.Subject) -> None:
    one = matrix.Combination(name, mode, k, "together")
    found = matrix.run_combination(subject, one, "trio")
    assert found.tokens == subject.plain
    if name == "model":  # the target itself: a draft that always agrees
        assert found.statistics.accepted == found.statistics.drafted
    if name == "hidden states":  # the MTP layer was trained for this
        assert found.statistics.acceptance_per_position()[0] > 0.5
    if name == "branches":
        assert found.statistics.drafted[0] > found.statistics.drafts


@pytest.mark.parametrize("mode", matrix.MODES)
def test_trees_beside_a_drafter_that_reads_hidden_states(
    mode: str, loaded: LoadedModel, layer: Any, texts: list[list[int]], plain: list[list[int]]
) -> None:
    """Of a tree the states of the first path are read; the rest comes with the next step."""
    drafter = FirstDrafter(
        TreeOfDrafts(SuffixDrafter(3), PromptLookupDrafter()), mtp(loaded, layer)
    )
    target = CachedTarget(loaded.model, hidden_states=True)
    tokens, counted = generate(target, drafter, texts, 14, num_speculative_tokens=4, mode=mode)
    assert tokens == plain
    assert drafter.drafts_trees
    assert drafter.failures == (0, 0)
    assert counted.draft_errors == 0
    assert counted.acceptance_length > 1.3
    assert not target.sequences


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


def test_the_command_line_drafts_trees(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--prompt", "The import statement", "--max-new-tokens", "24"]
    options = ["--drafter", "tree", "--k", "6", "--mode", "pipelined", "--json"]
    assert main(["run", str(FOLDER), *asked, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_as_without_drafts"]
    assert found["summary"]["drafts"] > 0
    assert found["summary"]["lost_drafts"] == 0


def test_the_command_line_says_so_where_drafts_cost_more_than_they_save(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(PromptLookupDrafter):
        async def propose(self, sequences: Any, k: int) -> Any:
            await anyio.sleep(0.3)  # a step of the target takes a few hundredths
            return await super().propose(sequences, k)

    monkeypatch.setattr(run_command, "PromptLookupDrafter", Slow)
    asked = ["--prompt", "The import statement", "--max-new-tokens", "8"]
    assert main(["run", str(FOLDER), *asked]) == 0
    text = capsys.readouterr().out
    (speed_up,) = re.findall(r"speed-up +([\d.]+) over", text)
    assert 0 < float(speed_up) < 1, text


def test_the_example_of_the_readme_runs() -> None:
    readme = (REPOSITORY / "packages" / "ascend-specdecode" / "README.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (example,) = [text for text in examples if "ascend_specdecode.hf" in text]
    done = run_python(["-c", example, str(FOLDER)], dict(os.environ), timeout=300)
    assert done.returncode == 0, done.stderr
    text, _, length = done.stdout.strip().rpartition(" ")
    assert re.search(r"[a-z]{3,}", text)
    assert float(length) >= 0

"""Prefill and decode on two engines whose caches hold latents: through `FolderConnector`.

Tiny DeepSeek-V3 (latents), GLM-5 (latents and index rows), and the trained GLM-5 with its DFlash2
draft (and the draft's keys). One process prefills all three, another one goes on with each, with
what was stored and with what a fault would have stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from engines import environment, run_script
from test_dflash_tiny_glm import DRAFT, NUM_DRAFTED, TARGET, prompts
from tiny_models import LENGTHS, random_prompts

pytestmark = pytest.mark.engine

BLOCK_SIZE, TOKEN_BUDGET, NUM_TOKENS = 16, 64, 16
MIN_MARGIN = 5e-4
"""As in test_smollm2.py."""

MODELS = {"mla": ["make_deepseek_v3"], "sfa": ["make_glm"]}
LATENT = tuple(MODELS)
FAULTS = {
    "mla": ("swapped layers", "stale slots", "torn", "flipped", "renamed", "removed"),
    "sfa": ("swapped layers", "stale slots", "no index rows"),
    "draft": ("no draft rows", "removed"),
}
TORN = "incomplete metadata, file not fully covered"


def asked(name: str) -> list[list[int]]:
    """Prompts of an engine; the longest one of random tokens comes in chunks."""
    return prompts()[:3] if name == "draft" else random_prompts()


def engine(name: str, folder: Path, role: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """An engine for the runner."""
    store = folder / f"store_{name}"
    connector = {
        "kv_connector": "FolderConnector",
        "kv_connector_module_path": "ascend_vllm_plugin.folder_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    arguments: dict[str, Any] = {
        "model": str(TARGET if name == "draft" else folder / name),
        "dtype": "bfloat16" if name == "draft" else "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 64,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "kv_transfer_config": connector,
    }
    if name == "draft":
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": str(DRAFT),
            "num_speculative_tokens": NUM_DRAFTED,
        }
    return {"name": name, "store": str(store), "engine": arguments, "runs": runs}


@attrs.frozen
class Outcome:
    """What both processes said."""

    prefill: dict[str, Any]
    decode: dict[str, Any]
    log: str

    def alone(self, name: str) -> list[list[int]]:
        """Tokens of the prefill engine, which went on alone."""
        found: list[list[int]] = self.prefill["engines"][name]["runs"]["alone"]["tokens"]
        return found

    def rest(self, name: str) -> list[list[int]]:
        """The same without the first token."""
        return [tokens[1:] for tokens in self.alone(name)]

    def run(self, name: str, change: str) -> dict[str, Any]:
        """What the decode engine did after a change of the store."""
        found: dict[str, Any] = self.decode["engines"][name]["runs"][change]
        return found

    def accepted(self, change: str) -> tuple[int, int]:
        """Drafted and accepted tokens of the engine with a draft."""
        counted = self.run("draft", change)["speculation"]
        names = ("num_draft_tokens", "num_accepted_tokens")
        drafted, accepted = (counted["after"][n] - counted["before"][n] for n in names)
        return drafted, accepted


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("folder_transfer")
    for part in ("prefill", "decode", *(f"store_{name}" for name in FAULTS)):
        (folder / part).mkdir()
    alone = {"name": "alone", "max_tokens": NUM_TOKENS, "store": "kept"}
    job: dict[str, Any] = {
        "models": {str(folder / name): maker for name, maker in MODELS.items()},
        "engines": [
            engine(name, folder, "kv_producer", [alone | {"prompts": asked(name)}])
            for name in FAULTS
        ],
        "reference": LATENT,
    }
    runner, env = "folder_transfer_runner.py", environment(True)
    prefill, _ = run_script(runner, job, folder / "prefill", env)
    job = {"models": {}, "engines": [], "reference": []}
    for name, faults in FAULTS.items():
        first = prefill["engines"][name]["runs"]["alone"]["tokens"]
        longer = [[*p, tokens[0]] for p, tokens in zip(asked(name), first, strict=True)]
        once = {"prompts": longer, "max_tokens": NUM_TOKENS - 1}
        runs = [once | {"name": change, "store": change} for change in ("kept", *faults)]
        job["engines"].append(engine(name, folder, "kv_consumer", runs))
    return Outcome(prefill, *run_script(runner, job, folder / "decode", env))


@pytest.mark.parametrize("name", LATENT)
def test_the_engine_alone_says_what_hf_says(name: str, outcome: Outcome) -> None:
    said = outcome.prefill["reference"][name]
    assert [case["tokens"] for case in said] == outcome.alone(name)
    assert min(min(case["margins"]) for case in said) > MIN_MARGIN


@pytest.mark.parametrize("name", FAULTS)
def test_the_prefill_engine_stores_a_file_for_each_prompt(name: str, outcome: Outcome) -> None:
    run = outcome.prefill["engines"][name]["runs"]["alone"]
    assert len(run["files"]) == len(asked(name))
    assert run["cached"] == [0] * len(asked(name))


def test_the_longest_prompt_is_computed_and_stored_in_chunks() -> None:
    assert max(LENGTHS) > 2 * TOKEN_BUDGET


@pytest.mark.parametrize("name", FAULTS)
def test_the_decode_engine_goes_on_as_one_engine_would(name: str, outcome: Outcome) -> None:
    run = outcome.run(name, "kept")
    assert run["cached"] == [len(p) // BLOCK_SIZE * BLOCK_SIZE for p in asked(name)]
    assert run["tokens"] == outcome.rest(name)


@pytest.mark.parametrize(
    ("name", "change"),
    [("mla", "swapped layers"), ("sfa", "swapped layers"), ("sfa", "no index rows")],
)
def test_wrong_rows_give_other_tokens(name: str, change: str, outcome: Outcome) -> None:
    assert outcome.run(name, change)["cached"] == outcome.run(name, "kept")["cached"]
    pairs = zip(outcome.run(name, change)["tokens"], outcome.rest(name), strict=True)
    assert all(found != expected for found, expected in pairs)


@pytest.mark.parametrize("name", LATENT)
def test_stale_slots_give_other_tokens_to_those_whose_slots_they_are_not(
    name: str, outcome: Outcome
) -> None:
    pairs = zip(outcome.run(name, "stale slots")["tokens"], outcome.rest(name), strict=True)
    assert [found == expected for found, expected in pairs] == [False, False, True]


@pytest.mark.parametrize("change", ["torn", "renamed", "removed"])
def test_files_that_say_no_or_another_prompt_are_not_loaded(change: str, outcome: Outcome) -> None:
    run = outcome.run("mla", change)
    assert run["cached"] == [0] * len(LENGTHS)
    assert run["tokens"] == outcome.rest("mla")


def test_a_changed_byte_is_noticed_and_the_prompt_computed(outcome: Outcome) -> None:
    run = outcome.run("mla", "flipped")
    assert run["tokens"] == outcome.rest("mla")
    assert all(file.endswith(".safetensors.refused") for file in run["files"])


def test_the_log_says_why_a_file_is_refused(outcome: Outcome) -> None:
    refused = [line for line in outcome.log.splitlines() if "the stored keys" in line]
    for reason in (TORN, "prompt is '", "its tensors are not those that were written"):
        assert any(reason in line for line in refused), reason
    assert all(".safetensors are refused: " in line for line in refused)


def test_the_rows_of_a_draft_are_moved_too(outcome: Outcome) -> None:
    """A draft changes no token; what shows is how many of its tokens are accepted."""
    assert outcome.run("draft", "removed")["tokens"] == outcome.rest("draft")
    assert outcome.run("draft", "no draft rows")["tokens"] == outcome.rest("draft")
    assert outcome.accepted("kept") == outcome.accepted("removed")
    assert outcome.accepted("no draft rows") != outcome.accepted("removed")

"""`ascend-vllm explain`: routing by vLLM's own code, of models whose folders hold no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draft_models import (
    DFLASH,
    DFLASH2,
    LAYERS,
    draft_config,
    make_glm_config,
    make_qwen3_config,
    write_config,
)
from engines import environment, run_script

from ascend_vllm_plugin.compat import installed_vllm
from ascend_vllm_plugin.routing import RoutingRow, RoutingTable, parse_routing

pytestmark = pytest.mark.engine

OURS = "ascend_vllm_plugin."
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
COMMON = ["--enforce-eager", "--max-model-len", "512"]


def speculation(draft: Path, tokens: int = 4) -> list[str]:
    """The option that adds a draft."""
    config = {"method": "dflash", "model": str(draft), "num_speculative_tokens": tokens}
    return ["--speculative-config", json.dumps(config)]


def drafter(model: str, tokens: int) -> list[str]:
    """The option that adds a drafter without a model."""
    config = {"method": "custom_class", "model": model, "num_speculative_tokens": tokens}
    return ["--speculative-config", json.dumps(config)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command said and how it ended."""
    folder = tmp_path_factory.mktemp("explain")
    glm, qwen3 = make_glm_config(folder / "glm"), make_qwen3_config(folder / "qwen3")
    dflash = write_config(folder / "dflash", draft_config(DFLASH, [0, 1]))
    dflash2 = write_config(folder / "dflash2", draft_config(DFLASH2, [0, 1]))
    commands = {
        "strict": [str(glm), "--json", "--profile", "A5", *COMMON, *speculation(dflash2)],
        "strict, a process for its rank": [
            *(str(glm), "--json", "--profile", "A5", *COMMON, *speculation(dflash2)),
            *("--distributed-executor-backend", "mp"),
        ],
        "not eager": [str(glm), "--json", "--max-model-len", "512", *speculation(dflash2)],
        "text": [str(qwen3), "--profile", "Ascend910B3", *COMMON, *speculation(dflash)],
        "fp8": [str(glm), *COMMON, "--kv-cache-dtype", "fp8"],
        "fp8 as data": [str(glm), "--json", *COMMON, "--kv-cache-dtype", "fp8"],
        "fp8 on ranks": [
            *(str(glm), *COMMON, "--kv-cache-dtype", "fp8"),
            *("--tensor-parallel-size", "2"),
        ],
        "k": [str(glm), *COMMON, *speculation(dflash2, tokens=8)],
        "k without a model": [
            str(qwen3),
            *COMMON,
            *drafter("ascend_vllm_plugin.NgramProposer", 511),
        ],
        "unknown drafter": [str(qwen3), *COMMON, *drafter(OURS + "NoSuch", 2)],
        "list of drafts": [str(qwen3), "--speculative-config", "[1]"],
        "no draft model": [str(qwen3), *COMMON, *speculation(folder / "nowhere")],
        "unknown key": [str(qwen3), "--speculative-config", '{"foo": 1}'],
        "heads": [str(make_qwen3_config(folder / "heads", num_key_value_heads=3)), *COMMON],
        "block": [str(qwen3), *COMMON, "--block-size", "24"],
        "wide head": [str(make_qwen3_config(folder / "wide", head_dim=1024)), *COMMON],
        "encoder": [str(make_qwen3_config(folder / "bert", **BERT)), *COMMON],
        "dtype": [str(qwen3), "--dtype", "float64"],
        "no model": [str(folder / "nowhere")],
        "no option": [str(glm), "--no-such-option"],
    }
    job = {
        "commands": [
            {"name": name, "arguments": ["explain", *arguments]}
            for name, arguments in commands.items()
        ]
    }
    return dict(run_script("cli_probe.py", job, folder, environment(simulate=False))[0])


def table(said: dict[str, Any], name: str) -> RoutingTable:
    """The table that a command printed as JSON, and nothing beside it."""
    assert said[name]["code"] == 0, said[name]["err"]
    return parse_routing(said[name]["out"])


def row(found: RoutingTable, kind: str) -> RoutingRow:
    """The only row of a kind."""
    (match,) = (one for one in found.rows if one.kind == kind)
    return match


def test_target_indexer_and_draft_are_explained(said: dict[str, Any]) -> None:
    found = table(said, "strict")
    backends = {one.kind: (one.backend, len(one.layers)) for one in found.rows}
    assert backends == {
        "target, full attention": ("sfa", 3),
        "target, indexer": ("sfa_indexer", 3),
        "draft, full attention": ("draft_flash", LAYERS),
    }
    assert found.plans is not None
    assert (found.plans.per_step, found.plans.layers, found.plans.builds) == (1, LAYERS, 0)
    assert {term.state for term in row(found, "draft, full attention").gate} == {"holds"}


def test_one_rank_is_explained_alike_wherever_it_would_run(said: dict[str, Any]) -> None:
    assert table(said, "strict, a process for its rank") == table(said, "strict")


def test_a_broken_term_sends_the_draft_to_the_table(said: dict[str, Any]) -> None:
    found = table(said, "not eager")
    draft = row(found, "draft, full attention")
    assert draft.backend == "standard"
    assert [term.rule for term in draft.gate if term.broken] == ["draft_flash.draft_eager"]
    assert found.plans is None
    assert row(found, "target, full attention").backend == "sfa"


def test_the_text_says_why(said: dict[str, Any]) -> None:
    assert said["text"]["code"] == 0, said["text"]["err"]
    lines = said["text"]["out"].splitlines()
    assert lines[0] == f"Ascend attention routing (simulated Ascend910B3, vLLM {installed_vllm()})"
    start = next(i for i, line in enumerate(lines) if line.startswith("draft, full attention"))
    draft = lines[start:]
    assert "2 layers -> standard" in draft[0]
    refused = [line for line in draft if line.startswith("  draft_flash: refused, ")]
    assert len(refused) == 3  # the product, the target and the kind of draft
    assert "DEVICE_LENGTH_FLASH_ATTN" in refused[0]


def test_a_refused_layer_ends_with_1_and_every_reason(said: dict[str, Any]) -> None:
    assert said["fp8"]["code"] == said["fp8 as data"]["code"] == 1
    assert said["fp8"]["out"] == ""
    assert "[sfa.kv_cache_dtype;" in said["fp8"]["err"]
    refused = json.loads(said["fp8 as data"]["out"])["refused"]
    assert f"ascend-vllm: {refused}\n" in said["fp8"]["err"]


def test_a_refusal_on_ranks_is_the_same(said: dict[str, Any]) -> None:
    """Each rank is a process of its own, whose traceback vLLM would log."""
    assert said["fp8 on ranks"]["code"] == 1
    message = json.loads(said["fp8 as data"]["out"])["refused"]
    assert f"ascend-vllm: {message}\n" in said["fp8 on ranks"]["err"]
    assert "Traceback" not in said["fp8 on ranks"]["err"]


def test_a_draft_that_does_not_fit_ends_with_1(said: dict[str, Any]) -> None:
    assert said["k"]["code"] == 1
    assert "num_speculative_tokens: found 8; allowed: at most 7" in said["k"]["err"]
    assert "pydantic" not in said["k"]["err"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "k without a model",
            "num_speculative_tokens: found 511; allowed: at most 510: max_",
        ),
        (
            "unknown drafter",
            "vLLM cannot run this: AttributeError: Module 'ascend_vllm_plug",
        ),
        ("unknown key", "foo: Unexpected keyword argument (found 1)"),
        ("heads", "vLLM cannot run this: AssertionError: num_heads (4) is not divisible"),
        ("block", "block_size: found 24; allowed: "),
        ("wide head", "head_size: found 1024; allowed: "),
        ("encoder", "attn_type: found encoder_only; allowed: decoder"),
    ],
)
def test_what_cannot_run_is_refused_in_plain_words(
    name: str, message: str, said: dict[str, Any]
) -> None:
    assert said[name]["code"] == 1
    assert message in said[name]["err"]
    assert "Traceback" not in said[name]["err"]
    assert said[name]["out"] == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no model", "nowhere': there is no such folder"),
        ("no draft model", "nowhere': there is no such folder"),
        ("list of drafts", "--speculative-config is [1]: allowed is a JSON object"),
        ("no option", "--no-such"),
        ("dtype", "invalid choice: 'float64' (choose from 'auto', 'bfloat16', "),
    ],
)
def test_bad_usage_ends_with_2(name: str, message: str, said: dict[str, Any]) -> None:
    assert said[name]["code"] == 2
    assert message in said[name]["err"]
    assert said[name]["out"] == ""

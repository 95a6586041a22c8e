"""``ascend-attn-backends explain`` on model configurations that Hugging Face writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_attn_backends.cli import main
from ascend_attn_backends.explain import ModelConfig

pytest.importorskip("transformers", reason="the test extra installs transformers")

from transformers import (
    AutoConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

DRAFT = {
    "model_type": "qwen3", "architectures": ["DFlash2DraftModel"], "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    GlmMoeDsaConfig(dtype="bfloat16").save_pretrained(tmp_path / "glm")
    return tmp_path / "glm"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return written(tmp_path / "draft", DRAFT)


def written(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


def explained(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    code = main(["explain", *map(str, arguments), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["layers"]
    layers: list[dict[str, Any]] = data["layers"]
    assert code == (0 if all(layer["backend"] for layer in layers) else 1)
    return layers


def summary(layers: list[dict[str, Any]]) -> list[tuple[str, str, int, str | None]]:
    return [(entry["role"], entry["kind"], entry["count"], entry["backend"]) for entry in layers]


def rules(layer: dict[str, Any], backend: str) -> set[str]:
    (verdict,) = [entry for entry in layer["verdicts"] if entry["backend"] == backend]
    return {refusal["rule"].removeprefix(f"{backend}.") for refusal in verdict["refusals"]}


def test_target_indexer_and_draft(
    capsys: pytest.CaptureFixture[str], glm: Path, draft: Path
) -> None:
    layers = explained(capsys, "--config", glm, "--draft", draft, "--profile", "A5", "--eager")
    assert summary(layers) == [
        ("target", "sfa", 78, "sfa"),
        ("indexer", "indexer, top 2048", 78, "sfa_indexer"),
        ("draft", "standard, not causal", 5, "draft_flash"),
    ]
    for layer in layers:
        assert list(layer) == ["role", "kind", "count", "backend", "verdicts"]
        for verdict in layer["verdicts"]:
            assert list(verdict) == ["backend", "refusals"]
            for refusal in verdict["refusals"]:
                assert list(refusal) == ["rule", "found", "allowed"]


@pytest.mark.parametrize(
    ("arguments", "broken"),
    [
        (["--profile", "A5"], {"draft_eager"}),
        (["--profile", "A5", "--runner", "v2", "--eager"], {"runner"}),
        (["--profile", "A3", "--eager"], {"device_length_flash_attn"}),
        (["--profile", "A2", "--runner", "v2"],
         {"device_length_flash_attn", "runner", "draft_eager"}),
        (["--profile", "A5", "--eager", "--draft-flash-attn", "off"], {"mode"}),
    ],
)  # fmt: skip
def test_the_draft_falls_back_with_reasons(
    capsys: pytest.CaptureFixture[str], glm: Path, draft: Path, arguments: list[str],
    broken: set[str],
) -> None:  # fmt: skip
    layers = explained(capsys, "--config", glm, "--draft", draft, *arguments)
    assert layers[-1]["backend"] == "standard"
    assert rules(layers[-1], "draft_flash") == broken
    alone = explained(capsys, "--config", glm, *arguments)
    assert [entry["backend"] for entry in alone] == [entry["backend"] for entry in layers[:-1]]


def test_wide_names_its_relaxations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, draft: Path
) -> None:
    Qwen3Config(dtype="bfloat16").save_pretrained(tmp_path / "qwen3")
    arguments = ("--config", tmp_path / "qwen3", "--draft", draft, "--profile", "A5", "--eager")
    layers = explained(capsys, *arguments, "--runner", "v2", "--draft-flash-attn", "wide")
    assert layers[-1]["backend"] == "draft_flash"
    assert [entry["rule"] for entry in layers[-1]["relaxations"]] == [
        "draft_flash.runner",
        "draft_flash.target_model_type",
    ]
    assert explained(capsys, *arguments)[-1]["backend"] == "standard"


def test_text_has_a_line_for_every_term(
    capsys: pytest.CaptureFixture[str], glm: Path, draft: Path
) -> None:
    assert main(["explain", "--config", str(glm), "--draft", str(draft), "--profile", "A5"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for number in range(1, 8):
        (line,) = [line for line in lines if line.startswith(f"condition {number} ")]
        assert ("BROKEN" in line) == (number == 4)
        assert "found" in line
    assert len([line for line in lines if line.startswith("exclusion ")]) == 5
    assert "condition 4 BROKEN the draft runs eager; found False; allowed: True" in lines
    assert lines[0].startswith("target: 78 layers (sfa) on Ascend950")
    assert lines[0].endswith(": sfa")


V4_LAYERS = [
    "sliding_attention", "heavily_compressed_attention",
    "compressed_sparse_attention", "compressed_sparse_attention",
]  # fmt: skip
MODELS: dict[str, tuple[Any, list[tuple[str, int]]]] = {
    "qwen3": (Qwen3Config(dtype="bfloat16"), [("standard", 32)]),
    "qwen3 windows": (
        Qwen3Config(num_hidden_layers=6, max_window_layers=2, use_sliding_window=True,
                    sliding_window=512),
        [("standard", 2), ("standard, sliding window 512", 4)],
    ),
    "llama": (LlamaConfig(num_hidden_layers=3), [("standard", 3)]),
    "mistral": (
        MistralConfig(num_hidden_layers=3, sliding_window=4096),
        [("standard, sliding window 4096", 3)],
    ),
    "deepseek_v3": (DeepseekV3Config(), [("mla", 61)]),
    "deepseek_v4": (
        DeepseekV4Config(layer_types=V4_LAYERS, num_hidden_layers=4),
        [("dsa", 1), ("dsa, compressed by 128", 1), ("dsa, compressed by 4, top 512", 2),
         ("indexer, compressed by 4, top 512", 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    config, expected = MODELS[name]
    config.save_pretrained(tmp_path)
    layers = explained(capsys, "--config", tmp_path, "--profile", "A5")
    kinds: dict[str, int] = {}
    for entry in layers:
        kind = entry["kind"].split(", sliding")[0] if name == "deepseek_v4" else entry["kind"]
        kinds[kind] = kinds.get(kind, 0) + entry["count"]
    assert kinds == dict(expected)
    loaded = AutoConfig.from_pretrained(tmp_path)
    ours = ModelConfig.load(tmp_path)
    assert ours.num_heads == loaded.num_attention_heads
    assert ours.num_layers == loaded.num_hidden_layers
    if name.startswith(("qwen3", "llama", "mistral")):
        assert ours.num_kv_heads == loaded.num_key_value_heads
        head_dim = getattr(loaded, "head_dim", None)
        assert ours.head_size == (head_dim or loaded.hidden_size // loaded.num_attention_heads)
    targets = [entry for entry in layers if entry["role"] == "target"]
    assert {r for entry in targets for r in rules(entry, "draft_flash")} >= {"role", "speculative"}
    assert all(entry["backend"] for entry in layers)


def test_sinks_are_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    GptOssConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    layers = explained(capsys, "--config", tmp_path, "--profile", "A5")
    assert all("has_sinks" in rules(entry, "standard") for entry in layers)


def test_a_quantised_cache_is_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scheme = {"kv_cache_scheme": {"type": "float", "num_bits": 8}}
    path = written(tmp_path / "q", DRAFT | {"quantization_config": scheme})
    (layer,) = explained(capsys, "--config", path, "--profile", "A5")
    assert "kv_cache_dtype" in rules(layer, "standard")
    assert layer["backend"] is None


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["standard, not causal"]),
        ({"is_causal": True}, ["standard"]),
        ({"dflash_config": {"causal": True}}, ["standard"]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 64}},
         ["standard, sliding window 64, not causal"]),
        ({"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 3,
          "sliding_window": 128},
         ["standard, sliding window 128", "standard, not causal"]),
    ],
)  # fmt: skip
def test_masks_of_block_drafts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, glm: Path, changes: dict[str, Any],
    kinds: list[str],
) -> None:  # fmt: skip
    path = written(tmp_path / "d", DRAFT | changes)
    layers = explained(capsys, "--config", glm, "--draft", path, "--profile", "A5", "--eager")
    found = [entry for entry in layers if entry["role"] == "draft"]
    assert [entry["kind"] for entry in found] == kinds
    assert {entry["backend"] for entry in found} == {"draft_flash"}


def test_layers_that_share_a_choice_of_keys_have_no_indexer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schedules = (
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FSSFSS"},
    )
    for number, changes in enumerate(schedules):
        config = GlmMoeDsaConfig(num_hidden_layers=6, **changes)
        full = config.indexer_types.count("full")
        assert full < 6
        raw = config.to_dict() | changes
        del raw["indexer_types"]
        path = written(tmp_path / str(number), raw)
        layers = explained(capsys, "--config", path, "--profile", "A5")
        assert [(e["role"], e["count"]) for e in layers] == [("target", 6), ("indexer", full)]


def test_layers_that_are_no_attention_have_no_backend(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    types = ["linear_attention"] * 3 + ["full_attention", "chunked_attention"]
    path = written(tmp_path / "hybrid", DRAFT | {"layer_types": types})
    layers = explained(capsys, "--config", path, "--profile", "A5")
    assert summary(layers) == [
        ("target", "standard", 1, "standard"),
        ("target", "linear_attention", 3, None),
        ("target", "chunked_attention", 1, None),
    ]
    assert rules(layers[1], "standard") == {"layer_type"}
    assert main(["explain", "--config", str(path), "--profile", "A5"]) == 1
    assert "found 'linear_attention'" in capsys.readouterr().out


GLM = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 2, "num_attention_heads": 64,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_n_heads": 32,
    "index_head_dim": 128,
}  # fmt: skip
BAD_CONFIGS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "config.json: found no JSON"),
    "a list": ("[]", "config.json: found a JSON list"),
    "no layers": (json.dumps({"model_type": "x"}), "found no num_hidden_layers; allowed"),
    "no heads": (json.dumps(DRAFT | {"num_attention_heads": 0}), "found num_attention_heads 0"),
    "no type": (json.dumps({"num_hidden_layers": 2}), "found model_type None"),
    "dtype": (json.dumps(DRAFT | {"torch_dtype": "int3"}), "found dtype 'int3'; allowed: float16"),
    "layer types": (json.dumps(DRAFT | {"layer_types": ["x"]}), "allowed: a list of 5 words"),
    "window": (
        json.dumps(DRAFT | {"layer_types": ["sliding_attention"] * 5}), "found no sliding_window",
    ),
    "too deep": ("[" * 100_000, "config.json: found no JSON"),
    "too many digits": ('{"a": ' + "9" * 5000 + "}", "config.json: found no JSON"),
    "too large": (json.dumps(DRAFT | {"head_dim": 10**30}), "head_dim, a whole number of at least"),
    "too many layers": (json.dumps(DRAFT | {"num_hidden_layers": 10**9}), "at most 4096"),
    "dtype list": (json.dumps(DRAFT | {"torch_dtype": [[1]]}), "found dtype [[1]]; allowed"),
    "soft cap": (json.dumps(DRAFT | {"attn_logit_softcapping": []}), "attn_logit_softcapping []"),
    "indexer number": (json.dumps(GLM | {"indexer_types": 3}), "found indexer_types 3; allowed"),
    "indexer count": (json.dumps(GLM | {"indexer_types": ["full"]}), "each of 2 layers"),
    "indexer word": (json.dumps(GLM | {"indexer_types": ["full", "x"]}), "full or shared for each"),
    "pattern": (json.dumps(GLM | {"index_topk_pattern": [[1], "F"]}), "F or S or full or shared"),
    "section": (json.dumps(DRAFT | {"quantization_config": 3}), "found quantization_config 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_configuration_that_cannot_be_used_is_one_clear_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    text, message = BAD_CONFIGS[name]
    (tmp_path / "config.json").write_text(text, "utf-8")
    assert main(["explain", "--config", str(tmp_path), "--profile", "A5"]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert message in found.err
    assert found.err.startswith("ascend-attn-backends: ")
    assert len(found.err.splitlines()) == 1


def test_a_draft_with_bad_architectures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, draft: Path
) -> None:
    bad = written(tmp_path / "bad", DRAFT | {"architectures": "DFlash2DraftModel"})
    arguments = ["--config", str(draft), "--draft", str(bad), "--profile", "A5"]
    assert main(["explain", *arguments]) == 2
    assert "bad/config.json: found architectures 'DFlash2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "{glm}", "--profile", "A9"], "A9"),
        (["--config", "{glm}/missing", "--profile", "A5"], "no such directory"),
        (["--config", "{glm}", "--draft", "{glm}/..", "--profile", "A5"], "no such file"),
        (["--config", "{glm}"], "--profile"),
        (["--profile", "A5"], "--config"),
        (["--config", "{glm}", "--profile", "A5", "--runner", "v3"], "v3"),
    ],
)
def test_bad_usage(
    capsys: pytest.CaptureFixture[str], glm: Path, arguments: list[str], message: str
) -> None:
    filled = [argument.format(glm=glm) for argument in arguments]
    try:
        code: int | str | None = main(["explain", *filled])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["explain", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert "examples:" in text
        assert "ascend-attn-backends explain --config" in text
        assert "exit codes:" in text


def test_as_a_module(draft: Path) -> None:
    command = [sys.executable, "-m", "ascend_attn_backends", "explain", "--config", str(draft),
               "--profile", "A2", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"][0]["backend"] == "standard"

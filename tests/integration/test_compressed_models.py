"""DeepSeek-V4 in real vLLM: the same greedy tokens as transformers give in float32.

A tiny model with random weights and one layer of each kind, served by the engines of
`tiny_engines.py`: the window alone, compressed keys that an indexer chooses, all of the heavily
compressed keys. vLLM computes it in half precision only, so the prompts are such that the best
logit is far from the second one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from engines import environment, hf_argmax, run_python
from several_engines import NUM_TOKENS, Outcome
from tiny_engines import COMPRESSED_FAULTS, HAS_COMPRESSED_KERNELS, TOKEN_BUDGET, half_prompts

from ascend_vllm_plugin import read_routing

pytestmark = pytest.mark.engine

MIN_MARGIN = 0.035
served = pytest.mark.skipif(
    not HAS_COMPRESSED_KERNELS,
    reason="vLLM's build for this processor (no avx512_bf16) lacks hc_pre_fused_cpu",
)


@attrs.frozen
class Judged:
    """What transformers says to what vLLM gave."""

    cases: list[dict[str, Any]]

    @property
    def tokens(self) -> list[list[int]]:
        """What transformers gives, greedily."""
        return [case["tokens"] for case in self.cases]


@pytest.fixture(scope="module")
def judged(single: Outcome, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """In a process of its own: vLLM gives transformers its own class of this configuration."""
    pairs = zip(half_prompts(), single.tokens("dsa"), strict=True)
    cases = [{"prompt": prompt, "output": output} for prompt, output in pairs]
    folder = tmp_path_factory.mktemp("reference")
    return Judged(hf_argmax(tiny_models / "deepseek_v4", cases, folder))


@served
def test_tokens_equal_transformers(single: Outcome, judged: Judged) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in single.tokens("dsa"))
    assert single.tokens("dsa") == judged.tokens
    assert min(min(case["margins"]) for case in judged.cases) > MIN_MARGIN
    assert all(len(set(tokens)) > 10 for tokens in judged.tokens)


@served
def test_every_layer_of_every_step_is_ours(single: Outcome) -> None:
    rows = read_routing(single.folder / "dsa.routing.json").rows
    assert [(row.backend, len(row.layers), row.chosen_by) for row in rows] == [
        ("dsa", 1, "selection")
    ] * 3
    assert [row.request["compress_ratio"] for row in rows] == [1, 4, 128]
    calls = single.run("dsa")["calls"]
    steps = sum(map(len, half_prompts())) // TOKEN_BUDGET + NUM_TOKENS
    assert calls["AscendDSAImpl.forward"] >= 3 * steps
    assert calls["AscendDSAIndexerImpl.forward"] * 3 == calls["AscendDSAImpl.forward"]


@served
def test_cached_prefixes_give_the_same_tokens(single: Outcome, judged: Judged) -> None:
    assert single.run("dsa")["cached"] == [0, 0, 0]
    assert single.tokens("dsa", "again") == judged.tokens


@served
@pytest.mark.parametrize("fault", COMPRESSED_FAULTS)
def test_a_fault_gives_other_tokens(fault: str, single: Outcome, judged: Judged) -> None:
    found = single.tokens("dsa", fault)
    assert found != [tokens[: len(found[0])] for tokens in judged.tokens]


@served
def test_speculation_gives_the_same_tokens(single: Outcome, judged: Judged) -> None:
    assert single.tokens("dsa, n-gram") == judged.tokens
    drafted, accepted = single.drafts("dsa, n-gram")
    assert drafted > accepted > 0


START = """
import sys
from vllm import LLM

LLM(model=sys.argv[1], dtype="float16", enforce_eager=True, skip_tokenizer_init=True,
    max_model_len=256, num_gpu_blocks_override=512, block_size=16)
"""


@pytest.mark.skipif(HAS_COMPRESSED_KERNELS, reason="vLLM's build for this processor has them")
def test_without_its_kernels_the_model_is_refused_before_its_weights(
    single: Outcome, tiny_models: Path
) -> None:
    done = run_python(["-c", START, str(tiny_models / "deepseek_v4")], environment(True))
    assert done.returncode != 0
    assert "ModelRefusedError: deepseek_v4 calls hc_pre_fused_cpu, which vLLM's" in done.stderr
    assert "Loading weights" not in done.stdout + done.stderr


def test_explaining_needs_no_kernels(single: Outcome, tiny_models: Path) -> None:
    """It takes no step, so the processor of this machine has no say in it."""
    model, settings = str(tiny_models / "deepseek_v4"), ["--dtype", "float16", "--block-size", "16"]
    command = ["-m", "ascend_vllm_plugin", "explain", model, "--skip-tokenizer-init"]
    done = run_python([*command, *settings, "--max-model-len", "256"], environment(True))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("-> dsa (") == 3

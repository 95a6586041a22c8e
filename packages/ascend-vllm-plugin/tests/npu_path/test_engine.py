"""A whole engine of vLLM on an emulated NPU, on the standalone base.

What runs is vLLM's own scheduler, worker, runner, model and sampler over torch_npu 2.13 and the
emulated aclnn operators. Tokens are compared with those of transformers on the CPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from npu_path import tiny_llama

pytestmark = pytest.mark.timeout(1200)  # a busy machine takes minutes to import vLLM

BLOCK = 128
BUDGET = 64
"""Tokens of a step: the prompts of 150 tokens take three."""


@attrs.frozen
class Engine:
    """An engine that has generated twice."""

    llm: Any
    first: list[list[int]]
    again: list[list[int]]
    cached: list[int]
    operators: Counter[str]
    steps: int

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker


def start(model: Path, **further: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="float16",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=BUDGET,
        disable_log_stats=False,
        **further,
    )


@pytest.fixture(scope="module")
def engine(npu: Any, model: Path) -> Iterator[Engine]:
    llm = start(model, enable_prefix_caching=True)
    with npu.record() as seen:
        first, _ = generate(llm)
    again, cached = generate(llm)
    operators = Counter(seen.operators)
    writes = sum(count for name, count in operators.items() if "ScatterPaKvCache" in name)
    yield Engine(llm, first, again, cached, operators, writes // tiny_llama.LAYERS)
    llm.llm_engine.engine_core.shutdown()


K = 3


@pytest.fixture(scope="module", params=["KnowingProposer", "HalfKnowingProposer"])
def drafting(
    request: pytest.FixtureRequest, engine: Engine, npu: Any, model: Path
) -> Iterator[Any]:
    """An engine whose drafts are known to be right, or right in their first token."""
    from npu_path import knowing_drafter

    if npu.profile.family.value != "A3":
        pytest.skip("the verification of drafts does not depend on the product: tested on A3")
    knowing_drafter.ANSWERS[:] = zip(tiny_llama.prompts(), engine.first, strict=True)
    drafts = {
        "method": "custom_class",
        "model": f"npu_path.knowing_drafter.{request.param}",
        "num_speculative_tokens": K,
    }
    with further_engine(npu) as settings:
        llm = start(model, speculative_config=drafts, **settings)
        tokens, _ = generate(llm)
        metrics = {one.name: one for one in llm.get_metrics()}
        sampled = [generate(llm, temperature=1.0, seed=seed)[0] for seed in (1, 1, 2)]
        yield request.param, tokens, metrics, sampled
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def further_engine(npu: Any) -> Iterator[dict[str, Any]]:
    """Memory for an engine beside the first one, which has what there was; taken away again."""
    before = npu.options["memory_bytes"]
    npu.set_memory(4 * before)
    try:
        yield {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": before // 4}
    finally:
        npu.set_memory(before)


def generate(llm: Any, **sampled: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens of the prompts, greedy unless told, and how many of each prompt were cached."""
    from vllm import SamplingParams

    fixed = {"max_tokens": tiny_llama.NEW_TOKENS, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(**{"temperature": 0, **fixed, **sampled})
    given = [{"prompt_token_ids": prompt} for prompt in tiny_llama.prompts()]
    done = llm.generate(given, sampling, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done], [
        one.num_cached_tokens or 0 for one in done
    ]


def test_tokens_equal_transformers(engine: Engine, model: Path) -> None:
    expected, lead = tiny_llama.greedy(model)
    assert lead > tiny_llama.LEAD  # float16 cannot decide otherwise
    assert engine.first == expected


def test_a_cached_prefix_gives_the_same_tokens(engine: Engine) -> None:
    assert engine.again == engine.first
    assert engine.cached == [0, 0, BLOCK]


def test_attention_is_the_operators_of_cann(engine: Engine) -> None:
    """One write and one attention call per layer and step; prompts in chunks, then decode."""
    attention = sum(n for name, n in engine.operators.items() if "FusedInferAttention" in name)
    writes = sum(n for name, n in engine.operators.items() if "ScatterPaKvCache" in name)
    assert attention == writes
    assert engine.steps >= sum(tiny_llama.LENGTHS) / BUDGET + tiny_llama.NEW_TOKENS - 1


def test_model_and_cache_are_on_the_npu(engine: Engine, npu: Any) -> None:
    runner = engine.worker.model_runner
    assert {parameter.device.type for parameter in runner.model.parameters()} == {"npu"}
    assert {cache.device.type for cache in runner.kv_caches} == {"npu"}
    assert npu.live["device_bytes"] > sum(cache.nbytes for cache in runner.kv_caches)


def test_the_cache_takes_the_memory_that_was_measured(engine: Engine, npu: Any) -> None:
    cache_config = engine.llm.llm_engine.vllm_config.cache_config
    caches = engine.worker.model_runner.kv_caches
    taken = sum(cache.nbytes for cache in caches)
    share = cache_config.gpu_memory_utilization
    total = npu.options["memory_bytes"]
    assert 0.8 * share * total < taken <= share * total
    assert caches[0].shape[2] == cache_config.block_size == BLOCK


def test_the_routing_says_where_it_ran(engine: Engine, npu: Any) -> None:
    table = json.loads(engine.llm.collective_rpc("routing")[0])
    assert table["mode"] == "standalone on emulated CANN"
    assert table["profile"] == npu.profile.soc_name
    (row,) = table["rows"]
    assert (row["backend"], len(row["layers"])) == ("standard", tiny_llama.LAYERS)
    assert row["backend_class"] == "ascend_vllm_plugin.npu.backends.NpuStandardBackend"
    assert row["request"]["provider"] == "torch_npu"


def test_no_kernel_of_the_cpu_build_is_there(engine: Engine) -> None:
    """NPU machines have a vLLM without C kernels; the one of these tests has them, unused."""
    assert not hasattr(torch.ops._C, "init_cpu_memory_env")
    assert "vllm.v1.worker.cpu_worker" not in sys.modules


def test_a_key_in_the_wrong_slot_shows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the comparison of tokens notices a fault of one slot."""
    from vllm.v1.worker import block_table

    from ascend_vllm_plugin.patches.kernel_dispatchers import LaunchableFunction

    dispatcher = block_table._COMPUTE_SLOT_MAPPING_KERNEL
    right = dispatcher.kernel.func

    def one_on(*arguments: Any, **named: Any) -> None:
        right(*arguments, **named)
        slots = named["slot_mapping"]
        slots[slots >= 0] += 1

    wrong = LaunchableFunction(one_on)
    monkeypatch.setattr(dispatcher, "kernel", wrong)
    engine.llm.reset_prefix_cache()
    tokens, _ = generate(engine.llm)
    assert tokens != engine.first


# Engines besides the first one; when one of them ends, the first cannot go on.


def test_drafts_are_verified_on_the_npu(drafting: Any, engine: Engine) -> None:
    """No draft changes a token; right ones are accepted to the last, wrong ones are not."""
    drafter, tokens, metrics, _ = drafting
    assert tokens == engine.first
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    drafted = metrics["vllm:spec_decode_num_draft_tokens"].value
    if drafter == "KnowingProposer":
        assert accepted == drafted > drafts
    else:
        assert 0 < drafts == accepted < drafted


def test_sampled_requests_with_drafts_follow_their_seed(drafting: Any, engine: Engine) -> None:
    first, same, other = drafting[-1]
    assert first == same
    assert first != other
    assert {len(tokens) for tokens in first} == {tiny_llama.NEW_TOKENS}


def test_latent_attention_equals_transformers(npu: Any, tmp_path: Path) -> None:
    """A tiny DeepSeek-V3 without experts, its latents and rotary rows in halves of the cache."""
    from npu_path import tiny_deepseek

    model = tiny_deepseek.make(tmp_path)
    expected, lead = tiny_llama.greedy(model)
    assert lead > tiny_deepseek.LEAD
    with further_engine(npu) as settings:
        llm = start(model, **settings)
        with npu.record() as seen:
            tokens, _ = generate(llm)
        (row,) = json.loads(llm.collective_rpc("routing")[0])["rows"]
        llm.llm_engine.engine_core.shutdown()
    assert tokens == expected
    assert row["backend_class"] == "ascend_vllm_plugin.npu.backends.NpuMLABackend"
    assert any("FusedInferAttention" in name for name in seen.operators)

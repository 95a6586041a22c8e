"""The adapters of latent attention: translation, refusals, and settings that stay the user's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from test_adapter import config, question
from tiny_models import make_mla_config
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ascend_attn_backends import AscendSFAPCPBackend, NoBackendError, run_ranks
from ascend_attn_ops import PartialAttention
from ascend_vllm_plugin import LayerRefusedError, facts, selection
from ascend_vllm_plugin.adapters.indexer import KeyChooser
from ascend_vllm_plugin.adapters.mla import MLABackend, MLADcpImpl, MLAImpl, MLAMetadataBuilder
from ascend_vllm_plugin.adapters.sfa import SFABackend
from ascend_vllm_plugin.adapters.shared_keys import padded
from ascend_vllm_plugin.environment import judged_profile
from ascend_vllm_plugin.latent_settings import latent_settings_kept
from ascend_vllm_plugin.patches import dcp_merge
from ascend_vllm_plugin.simulated_platform import SimulatedAscendPlatform

pytestmark = pytest.mark.engine

BLOCK_SIZE, LATENT, ROPE = 16, 512, 64


@pytest.fixture(autouse=True)
def a5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HWPROFILE", "A5")


@pytest.fixture
def current_config() -> Iterator[VllmConfig]:
    """What vLLM knows while it builds a model."""
    current = VllmConfig()
    with set_current_vllm_config(current):
        yield current


def latent_config(**parallel: int) -> Any:
    """A model with one latent row for all heads."""
    found = config()
    found.model_config.get_num_kv_heads = lambda parallel: 1
    vars(found.parallel_config).update(parallel)
    return found


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("changes", "block_size", "message"),
    [
        ({"head_size": 320}, 128, "found 256; allowed: a head size of"),
        ({}, 24, "found 24; allowed: a.* multiple of 16, at most 1024"),
        ({"dtype": torch.float64}, 128, r"found float64; allowed: one of \('float16'"),
        ({"kv_cache_dtype": "fp8"}, 128, "found fp8; allowed: auto or float32"),
    ],
)
def test_selection_refuses_bad_input_with_the_rule(
    sparse: bool, changes: dict[str, Any], block_size: int, message: str
) -> None:
    asked = latent_config()
    asked.cache_config.block_size = block_size
    asks = question(use_mla=True, use_sparse=sparse, **{"head_size": LATENT + ROPE, **changes})
    name = "sfa" if sparse else "mla"
    with pytest.raises(NoBackendError, match=rf"  {name} +refused\n +[a-z_]+: {message}"):
        selection.select(asks, asked, None)


@pytest.mark.parametrize(
    ("sparse", "parallel", "expected"),
    [
        (False, {}, "adapters.mla.MLABackend"),
        (False, {"decode_context_parallel_size": 2}, "adapters.mla.MLADcpBackend"),
        (False, {"prefill_context_parallel_size": 2}, "adapters.mla.MLAPcpBackend"),
        (True, {}, "adapters.sfa.SFABackend"),
        (True, {"decode_context_parallel_size": 2}, "adapters.sfa.SFADcpBackend"),
        (True, {"prefill_context_parallel_size": 2}, "adapters.sfa.SFAPcpBackend"),
    ],
)
def test_selection_finds_the_adapter(sparse: bool, parallel: dict[str, int], expected: str) -> None:
    asks = question(use_mla=True, use_sparse=sparse, head_size=LATENT + ROPE)
    route = selection.select(asks, latent_config(**parallel), None)
    assert route.class_path == f"ascend_vllm_plugin.{expected}"


LAYOUTS = [
    *((2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4)),
    *((1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 2, 4)),
    *((4, 2, 1), (4, 2, 2), (4, 2, 8), (2, 4, 1), (2, 4, 4), (2, 4, 8)),
]
"""(TP, PCP, DCP) that vLLM takes."""


def ranks_of_vllm(
    layout: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> dict[str, set[int]]:
    """Ranks of each group of vLLM that rank 0 belongs to; no group is opened."""
    tensor, prefill, decode = layout
    opened: dict[str, set[int]] = {}

    def open_group(ranks: list[list[int]], *_: Any, group_name: str, **__: Any) -> Any:
        (opened[group_name],) = (set(group) for group in ranks if 0 in group)
        return SimpleNamespace(rank_in_group=0)

    monkeypatch.setattr(parallel_state, "init_model_parallel_group", open_group)
    monkeypatch.setattr(
        parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0, cpu_group=None)
    )
    for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_ENGRAM_DP"):
        monkeypatch.setattr(parallel_state, name, None)
    here = {"is_initialized": True, "get_world_size": tensor * prefill, "get_rank": 0}
    for name, value in here.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    parallel_state.initialize_model_parallel(tensor, 1, prefill, decode, backend="gloo")
    return opened


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("current_config")
def test_ranks_are_counted_as_vllm_groups_them(
    layout: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that work on one request, and those of them that bring other heads."""
    tensor, prefill, decode = layout
    ParallelConfig(
        tensor_parallel_size=tensor,
        prefill_context_parallel_size=prefill,
        decode_context_parallel_size=decode,
    )
    groups = ranks_of_vllm(layout, monkeypatch)
    asked = latent_config(
        prefill_context_parallel_size=prefill, decode_context_parallel_size=decode
    )
    request = facts.request_from(question(use_mla=True), asked, None)
    assert len(groups["dcp"] | groups["pcp"]) == request.context_parallel_size
    shares_of_heads = {rank % tensor for rank in groups["dcp"]}
    assert len(shares_of_heads) * prefill == request.context_parallel_size
    both = prefill > 1 and decode > 1
    assert (prefill * decode != request.context_parallel_size) is both  # control: the product


@pytest.mark.parametrize(("decode", "heads"), [(2, 128), (4, 64)])
def test_heads_of_ranks_that_share_prompts_are_not_counted_twice(decode: int, heads: int) -> None:
    asked = latent_config(prefill_context_parallel_size=2, decode_context_parallel_size=decode)
    asks = question(use_mla=True, use_sparse=True, head_size=LATENT + ROPE)
    request = facts.request_from(asks, asked, heads)
    assert AscendSFAPCPBackend.refusals(request, judged_profile()) == []
    twice = attrs.evolve(request, context_parallel_size=2 * decode)
    refusals = AscendSFAPCPBackend.refusals(twice, judged_profile())
    assert [one.parameter for one in refusals] == ["query"]  # control: 256 heads


@pytest.mark.parametrize("sparse", [False, True])
def test_sharing_keys_and_prompts_is_refused_by_selection(sparse: bool) -> None:
    asked = latent_config(prefill_context_parallel_size=2, decode_context_parallel_size=2)
    asks = question(use_mla=True, use_sparse=sparse, head_size=LATENT + ROPE)
    with pytest.raises(NoBackendError, match="use_pcp: found True; allowed: ranks that share"):
        selection.select(asks, asked, None)


def layer(cls: type[MLAImpl] = MLAImpl, **changes: Any) -> MLAImpl:
    arguments = {
        "num_heads": 2,
        "head_size": LATENT + ROPE,
        "scale": 0.1,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "kv_b_proj": object(),
    }
    return cls(**{**arguments, **changes})


@pytest.mark.usefixtures("current_config")
@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"sliding_window": 128}, "sliding_window"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "kv_sharing_target_layer_name"),
        ({"layer_scale": 3}, "layer_scale"),
    ],
)
def test_layer_refuses_what_it_does_not_compute(changes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(LayerRefusedError) as raised:
        layer(**changes)
    assert parameter in [refusal.parameter for refusal in raised.value.refusals]


def test_shared_keys_need_the_v2_runner(current_config: VllmConfig) -> None:
    current_config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(LayerRefusedError, match=r"runner: found v1; allowed: v2 \(VLLM_USE_V2"):
        layer(MLADcpImpl)


@pytest.mark.usefixtures("current_config")
@pytest.mark.parametrize(("heads", "size", "found"), [(20, 128, "20"), (16, 64, "64")])
def test_indexer_is_refused_with_the_rule(heads: int, size: int, found: str) -> None:
    with pytest.raises(LayerRefusedError, match=rf"sfa_indexer.*\n.*query: found {found}; allowed"):
        KeyChooser("layer.k_cache", heads, size, 32)


def common(starts: list[int], lens: list[int], **changes: Any) -> CommonAttentionMetadata:
    offsets = torch.tensor(starts, dtype=torch.int32)
    tokens = starts[-1]
    fields = {
        "query_start_loc": offsets,
        "query_start_loc_cpu": offsets,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "num_reqs": len(lens),
        "num_actual_tokens": tokens,
        "max_query_len": max(map(int.__sub__, starts[1:], starts)),
        "max_seq_len": max(lens),
        "block_table_tensor": torch.arange(4 * len(lens), dtype=torch.int32).reshape(len(lens), 4),
        "slot_mapping": torch.full((tokens,), -1),
    }
    return CommonAttentionMetadata(**{**fields, **changes})


def builder(current: VllmConfig, pcp: int = 1) -> MLAMetadataBuilder:
    current.parallel_config.prefill_context_parallel_size = pcp
    block = SimpleNamespace(block_size=BLOCK_SIZE)
    return MLAMetadataBuilder(block, ["layer"], current, torch.device("cpu"))


@pytest.mark.parametrize(("pcp", "decodes", "tokens"), [(1, 3, 9), (2, 1, 4)])
def test_what_vllm_is_told_to_be_a_decode(
    pcp: int, decodes: int, tokens: int, current_config: VllmConfig
) -> None:
    """The second request has one token in this step, and is the piece of a prompt all the same."""
    flags = torch.tensor([False, True, True])
    step = common([0, 4, 5, 9], [20, 1, 4], is_prefilling=flags)
    metadata = builder(current_config, pcp).build(0, step)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (decodes, tokens)
    assert metadata.num_prefills == 3 - decodes
    assert metadata.step.num_tokens == 9
    assert metadata.decode is metadata


@pytest.mark.parametrize("joined", [False, True])
def test_layer_writes_and_reads_vllms_cache(joined: bool, current_config: VllmConfig) -> None:
    """Against attention over the same latents, computed here in float64."""
    torch.manual_seed(0)
    cache = torch.zeros(4, BLOCK_SIZE, LATENT + ROPE)
    latents, ropes = torch.randn(20, LATENT), torch.randn(20, 1, ROPE)
    query = torch.randn(3, 2, LATENT), torch.randn(3, 2, ROPE)
    impl = layer()
    slots = torch.tensor([*range(20), -1])
    padded = [torch.cat([rows, torch.ones_like(rows[:1])]) for rows in (latents, ropes)]
    impl.do_kv_cache_update(*padded, cache, slots, "auto", torch.ones(1))
    metadata = builder(current_config).build(0, common([0, 3], [20]))
    given = torch.cat(query, -1) if joined else query
    out, lse = impl.forward_mqa(given, cache, metadata, None)
    keys = torch.cat([latents, ropes[:, 0]], -1).double()
    scores = torch.einsum("qhd,kd->hqk", torch.cat(query, -1).double(), keys) * 0.1
    hidden = torch.arange(20) > torch.arange(17, 20)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,kd->qhd", weights, latents.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert lse is None
    assert cache.flatten(0, 1)[20:].count_nonzero() == 0


def test_rows_of_padding_are_neutral() -> None:
    part = PartialAttention(torch.ones(2, 3, 4), torch.ones(2, 3))
    out, lse = padded(part, 5)
    assert (out.shape, lse.shape) == ((5, 3, 4), (5, 3))
    assert out[2:].count_nonzero() == 0
    assert lse[2:].isneginf().all()


def shares_of_attention() -> tuple[list[PartialAttention], torch.Tensor, torch.Tensor]:
    """Two ranks' parts of 4 heads and 5 tokens; the whole in float64. Token 0 has no key at all,
    token 1 none on the second rank."""
    torch.manual_seed(0)
    scores = torch.randn(5, 4, 7).double()
    scores[0] = float("-inf")
    scores[1, :, 3:] = float("-inf")
    values = torch.randn(7, 8).double()
    parts = []
    for keys in (slice(0, 3), slice(3, 7)):
        lse = scores[..., keys].logsumexp(-1)
        out = scores[..., keys].softmax(-1).nan_to_num() @ values[keys]
        parts.append(PartialAttention(out.float(), lse.float()))
    return parts, scores.softmax(-1).nan_to_num() @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize(
    ("merge", "own_heads"),
    [(dcp_merge.merge_to_own_heads, True), (dcp_merge.merge_to_all_heads, False)],
)
def test_merged_ranks_give_the_whole(
    merge: Callable[..., Any], own_heads: bool, natural: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_merge, "TorchDCPGroup", lambda group: group)
    parts, whole, whole_lse = shares_of_attention()
    unit = 1.0 if natural else torch.tensor(2.0).log().item()

    def on_rank(group: Any) -> Any:
        part = parts[group.rank]
        coordinator = SimpleNamespace(device_group=group)
        return merge(
            part.out, part.lse / unit, coordinator, return_lse=True, is_lse_base_on_e=natural
        )

    for rank, (out, lse) in enumerate(run_ranks(2, on_rank)):
        heads = slice(2 * rank, 2 * rank + 2) if own_heads else slice(None)
        torch.testing.assert_close(out.double(), whole[:, heads], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double() * unit, whole_lse[:, heads], rtol=1e-5, atol=1e-5)


def mla_settings(tmp_path: Path, **changes: Any) -> VllmConfig:
    """The configuration of an MLA model after vLLM's own CPU platform has seen it."""
    model = make_mla_config(tmp_path / "mla")
    arguments = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, **changes}
    return EngineArgs(model=str(model), max_model_len=128, **arguments).create_engine_config()


def settings(config: VllmConfig) -> tuple[int, bool, bool, int]:
    cache, scheduler = config.cache_config, config.scheduler_config
    return (
        cache.block_size,
        cache.enable_prefix_caching,
        scheduler.enable_chunked_prefill,
        scheduler.max_num_batched_tokens,
    )


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX vLLM limits MLA on a CPU no more"
)
def test_the_cpu_platform_still_limits_mla(tmp_path: Path) -> None:
    limited = mla_settings(
        tmp_path,
        block_size=64,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=64,
    )
    assert settings(limited) == (16, False, False, 2048), "drop latent_settings.py"


@pytest.mark.parametrize(("given", "expected"), [(64, 64), (None, 128)])
def test_our_platform_keeps_the_settings_of_mla(
    given: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LD_PRELOAD", "")
    config = mla_settings(tmp_path)
    cache, scheduler = config.cache_config, config.scheduler_config
    cache.user_specified_block_size = given is not None
    cache.block_size = given or cache.DEFAULT_BLOCK_SIZE
    cache.enable_prefix_caching, scheduler.enable_chunked_prefill = True, True
    scheduler.max_num_batched_tokens = 64
    for _ in range(2):  # vLLM calls it again for each derived configuration
        SimulatedAscendPlatform.check_and_update_config(config)
        assert settings(config) == (expected, True, True, 64)


def fake_config(**model: Any) -> Any:
    fields = {"use_mla": True, "hf_config": SimpleNamespace(model_type="deepseek_v3"), **model}
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        cache_config=SimpleNamespace(
            block_size=64, user_specified_block_size=True, enable_prefix_caching=True
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=64),
        attention_config=SimpleNamespace(backend=None),
    )


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (fake_config(), True),
        (fake_config(use_mla=False), False),
        (fake_config(hf_config=SimpleNamespace(model_type="deepseek_v4")), True),
    ],
)
def test_settings_of_other_models_are_not_touched(config: Any, kept: bool) -> None:
    with latent_settings_kept(config):
        config.cache_config.block_size = 16
    assert config.cache_config.block_size == (64 if kept else 16)


def test_settings_for_a_cpu_backend_of_vllm_are_not_touched() -> None:
    asked = fake_config()
    asked.attention_config.backend = AttentionBackendEnum.CPU_MLA
    with latent_settings_kept(asked):
        asked.cache_config.block_size = 16
    assert asked.cache_config.block_size == 16


@pytest.mark.parametrize(("backend", "sparse"), [(MLABackend, False), (SFABackend, True)])
def test_vllm_accepts_the_backends(backend: Any, sparse: bool) -> None:
    reasons = backend.validate_configuration(
        head_size=LATENT + ROPE,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=64,
        use_mla=True,
        has_sink=False,
        use_sparse=sparse,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type="decoder",
    )
    assert reasons == []

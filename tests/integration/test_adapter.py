"""The adapter of the standard backend: translation, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from ascend_attn_backends import AscendAttentionMetadataBuilder, NoBackendError, Verdict
from ascend_vllm_plugin import (
    LayerRefusedError,
    OptionError,
    SimulationUnavailableError,
    TransferWindows,
    UnknownConnectorError,
    facts,
    kv_transfer,
    selection,
)
from ascend_vllm_plugin.adapters.batch import attention_batch
from ascend_vllm_plugin.adapters.standard import StandardBackend, StandardImpl
from ascend_vllm_plugin.simulated_platform import WORKER, SimulatedAscendPlatform


def common(device: str = "cpu", **changes: Any) -> CommonAttentionMetadata:
    """Requests with 2 of 5 and 1 of 130 tokens in blocks of 128."""
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    lens = torch.tensor([5, 130], dtype=torch.int32)
    table = torch.tensor([[4, 0], [7, 2]], dtype=torch.int32)
    slots = torch.tensor([4 * 128 + 3, 4 * 128 + 4, 2 * 128 + 1])
    fields: dict[str, Any] = {
        "query_start_loc": starts.to(device),
        "query_start_loc_cpu": starts,
        "seq_lens": lens.to(device),
        "seq_lens_cpu_upper_bound": lens,
        "num_reqs": 2,
        "num_actual_tokens": 3,
        "max_query_len": 2,
        "max_seq_len": 130,
        "block_table_tensor": table.to(device),
        "slot_mapping": slots.to(device),
    }
    return CommonAttentionMetadata(**{**fields, **changes})


@pytest.fixture
def current_config() -> Iterator[VllmConfig]:
    """What vLLM knows while it builds a model."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def test_batch_holds_what_vllm_said() -> None:
    batch = attention_batch(common(), drafts_in_flight=False)
    batch.validate(block_size=128, num_blocks=8)
    assert batch.query_start_loc.tolist() == [0, 2, 3]
    assert batch.host_seq_lens().tolist() == [5, 130]
    assert batch.block_table.tolist() == [[4, 0], [7, 2]]
    assert batch.slot_mapping.tolist() == [515, 516, 257]
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len) == (2, 3, 2)


def test_batch_leaves_out_what_is_beyond_the_counts() -> None:
    padded = common()
    padded.slot_mapping = torch.cat([padded.slot_mapping, torch.full((5,), -1)])
    padded.block_table_tensor = torch.cat([padded.block_table_tensor, torch.zeros(2, 2).int()])
    batch = attention_batch(padded, drafts_in_flight=False)
    assert batch.slot_mapping.shape == (3,)
    assert batch.block_table.shape == (2, 2)


def test_metadata_reads_nothing_from_a_device() -> None:
    """Tensors on `meta` have no values: reading one raises."""
    batch = attention_batch(common("meta"), drafts_in_flight=False)
    built = AscendAttentionMetadataBuilder(block_size=128).build(batch)
    (launch,) = built.launches
    assert launch.seq_lens == (5, 130)
    assert launch.query_lens_cumulative == (2, 3)


def test_lengths_that_only_the_device_knows_stay_there() -> None:
    batch = attention_batch(common("meta"), drafts_in_flight=True)
    assert batch.seq_lens_cpu is None
    built = AscendAttentionMetadataBuilder(block_size=128).build(batch)
    assert built.launches == ()
    assert built.token_step is not None
    assert built.token_step.key_bounds == (5, 5, 130)
    unbounded = common("meta")
    unbounded.seq_lens_cpu_upper_bound = None
    batch = attention_batch(unbounded, drafts_in_flight=True)
    with pytest.raises((RuntimeError, NotImplementedError)):  # control: then they are read
        AscendAttentionMetadataBuilder(block_size=128).build(batch)


def layer(**changes: Any) -> StandardImpl:
    arguments = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, **changes}
    return StandardImpl(**arguments)


@pytest.mark.usefixtures("current_config")
def test_layer_writes_and_reads_vllms_cache() -> None:
    """Against attention over the same keys and values, computed here in float64."""
    torch.manual_seed(0)
    cache = torch.zeros(8, 2, 128, 128)
    history = torch.randn(2, 5, 2, 64)
    query, output = torch.randn(2, 4, 64), torch.empty(2, 4, 64)
    impl = layer()
    impl.do_kv_cache_update(
        None, history[0], history[1], cache, torch.tensor([512, 513, 514, 515, 516])
    )
    metadata = AscendAttentionMetadataBuilder(block_size=128).build(
        attention_batch(
            common(
                query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
                query_start_loc_cpu=torch.tensor([0, 2], dtype=torch.int32),
                seq_lens=torch.tensor([5], dtype=torch.int32),
                num_reqs=1,
                num_actual_tokens=2,
            ),
            drafts_in_flight=False,
        )
    )
    result = impl.forward(None, query, None, None, cache, metadata, output)
    assert result is output
    keys, values = history.double().repeat_interleave(2, dim=2)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * 0.125
    scores[:, 0, 4] = float("-inf")
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("current_config")
def test_layer_without_metadata_is_a_measurement_of_memory() -> None:
    output = torch.ones(3, 4, 64)
    layer().forward(None, torch.ones(3, 4, 64), None, None, torch.empty(0), None, output)
    assert not output.any()


@pytest.mark.usefixtures("current_config")
@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"alibi_slopes": [0.5] * 4}, "has_alibi"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"sinks": torch.zeros(4)}, "has_sinks"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"attn_type": "encoder_only"}, "attn_type"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "kv_sharing_target_layer_name"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
        ({"head_size": 40}, "query"),
    ],
)
def test_layer_refuses_what_it_does_not_compute(changes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(LayerRefusedError) as raised:
        layer(**changes)
    assert parameter in [refusal.parameter for refusal in raised.value.refusals]
    assert all(refusal.allowed and refusal.source for refusal in raised.value.refusals)


@pytest.mark.usefixtures("current_config")
def test_layer_refuses_a_quantised_output() -> None:
    with pytest.raises(LayerRefusedError, match="output_scale"):
        layer().forward(
            None,
            torch.ones(1, 4, 64),
            None,
            None,
            torch.empty(0),
            None,
            torch.ones(1, 4, 64),
            output_scale=torch.ones(1),
        )


def question(**changes: Any) -> AttentionSelectorConfig:
    fields = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 128}
    return AttentionSelectorConfig(**{**fields, **changes})


def config() -> Any:
    """The parts of vLLM's configuration that selection reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: 4,
            get_num_kv_heads=lambda parallel: 2,
            get_sliding_window=lambda: None,
            enforce_eager=False,
            hf_text_config=SimpleNamespace(sliding_window=32),
            hf_config=SimpleNamespace(model_type="qwen3"),
        ),
        speculative_config=None,
        attention_config=SimpleNamespace(backend=None),
        additional_config={},
        use_v2_model_runner=False,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(block_size=128),
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )


def test_selection_takes_a_plain_layer() -> None:
    route = selection.select(question(has_sliding_window=True), config(), None)
    assert route.class_path == f"{StandardBackend.__module__}.{StandardBackend.__qualname__}"
    assert route.selection is not None
    assert route.selection.request.sliding_window == 32
    assert route.selection.request.role == "target"
    assert not route.selection.request.speculative


def test_selection_knows_target_and_draft_of_speculation() -> None:
    target = SimpleNamespace(hf_config=SimpleNamespace(model_type="glm_moe_dsa"))
    draft = SimpleNamespace(enforce_eager=True, architectures=["DFlash2DraftModel"])
    asked = config()
    asked.speculative_config = SimpleNamespace(target_model_config=target, draft_model_config=draft)
    asked.use_v2_model_runner = True
    request = facts.request_from(question(), asked, None)
    assert (request.speculative, request.runner, request.draft_eager) == (True, "v2", True)
    assert request.target_model_type == "glm_moe_dsa"
    assert request.draft_architecture == "DFlash2DraftModel"


def test_selection_takes_n_grams_for_no_draft_model() -> None:
    target = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="llama"), enforce_eager=True, architectures=["X"]
    )
    asked = config()
    asked.speculative_config = SimpleNamespace(
        target_model_config=target, draft_model_config=target
    )
    request = facts.request_from(question(), asked, None)
    assert (request.speculative, request.draft_eager, request.draft_architecture) == (
        True,
        False,
        None,
    )


def test_selection_passes_over_a_backend_without_adapter() -> None:
    route = selection.select(question(), config(), None)
    assert route.selection is not None
    accepting = [v.backend for v in route.selection.verdicts if v.accepted]
    assert accepting == ["standard"]
    stranger = attrs.evolve(
        route.selection, backend="new", verdicts=(Verdict("new", ()), *route.selection.verdicts)
    )
    chosen = selection.among_adapted(stranger)
    assert chosen.backend == "standard"
    (refusal,) = chosen.verdicts[0].refusals
    assert (refusal.rule, refusal.found) == ("vllm.adapter", "new")


def test_selection_knows_a_layer_of_a_draft() -> None:
    from vllm.compilation.backends import set_model_tag

    with set_model_tag("eagle_head"):
        route = selection.select(question(), config(), None)
    assert route.selection is not None
    assert route.selection.request.role == "draft"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"use_mla": True}, "standard.use_mla"),
        ({"has_sink": True}, "standard.has_sinks"),
        ({"use_mm_prefix": True}, "standard.has_multimodal_prefix"),
        ({"kv_cache_dtype": "fp8"}, "standard.kv_cache_dtype"),
        ({"attn_type": "encoder"}, "standard.attn_type"),
        ({"use_kv_connector": True, "use_sparse": True}, "vllm.use_kv_connector"),
        ({"use_kv_connector": True, "use_mla": True}, "vllm.use_kv_connector"),
        ({"use_batch_invariant": True}, "vllm.use_batch_invariant"),
        ({"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8"}, "standard.kv_cache_dtype"),
        ({"use_rswa": True}, "vllm.use_rswa"),
        ({"use_adaptive_verification": True}, "vllm.use_adaptive_verification"),
    ],
)
def test_selection_refuses_with_the_rule(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(NoBackendError) as raised:
        selection.select(question(**changes), config(), None)
    assert f"[{rule};" in str(raised.value)


def test_scales_per_head_of_a_cache_that_is_not_quantised_refuse_nothing() -> None:
    """A checkpoint has them, and the user asked for keys and values as they are computed."""
    route = selection.select(question(use_per_head_quant_scales=True), config(), None)
    assert route.class_path.endswith("StandardBackend")


def test_a_kv_connector_is_refused_for_the_layers_of_a_draft_only() -> None:
    from vllm.compilation.backends import set_model_tag

    connected = question(use_kv_connector=True)
    assert selection.select(connected, config(), None).class_path.endswith("StandardBackend")
    with set_model_tag("eagle_head"), pytest.raises(NoBackendError, match="with a draft model"):
        selection.select(connected, config(), None)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("WindowedNothing", "Windowed and a connector that vLLM has"),
        ("WindowedMultiConnector", "a MultiConnector of Windowed connectors"),
    ],
)
def test_unknown_connectors_are_named(name: str, allowed: str) -> None:
    with pytest.raises(UnknownConnectorError, match=f"kv_connector {name}: allowed is {allowed}"):
        getattr(kv_transfer, name)


def test_a_windowed_connector_is_what_vllms_factory_makes() -> None:
    transfer = KVTransferConfig(
        kv_connector="WindowedExampleConnector",
        kv_connector_module_path="ascend_vllm_plugin.kv_transfer",
        kv_role="kv_both",
    )
    made = KVConnectorFactory.get_connector_class(transfer)
    assert issubclass(made, TransferWindows)
    assert issubclass(made, ExampleConnector)
    assert KVConnectorFactory.get_connector_class(transfer) is made
    assert supports_hma(made) == supports_hma(ExampleConnector)


def test_a_backend_without_adapter_is_refused_with_the_rule() -> None:
    latent = config()
    latent.model_config.get_num_kv_heads = lambda parallel: 1
    adapters = {"standard": selection.ADAPTERS["standard"]}
    with pytest.raises(NoBackendError, match=r"found mla; allowed: .*\[vllm\.adapter;"):
        selection.select(question(use_mla=True, head_size=576), latent, None, adapters)


@pytest.mark.parametrize(
    ("selected", "expected"),
    [(None, None), ("CUSTOM", None), ("CPU_ATTN", "CPU_ATTN"), ("CPU_MLA", "CPU_MLA")],
)
def test_users_choice(selected: str | None, expected: str | None) -> None:
    member = None if selected is None else AttentionBackendEnum[selected]
    assert selection.user_choice(member) == expected


def test_users_choice_of_a_backend_that_is_not_here() -> None:
    with pytest.raises(NoBackendError, match="found FLASH_ATTN; allowed in simulate mode"):
        selection.user_choice(AttentionBackendEnum.FLASH_ATTN)


@pytest.fixture
def stock_config(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """A configuration before any platform chose a worker."""
    monkeypatch.setenv("ASCEND_HWPROFILE", "")
    config = VllmConfig()
    config.parallel_config.worker_cls = "auto"
    return config


def test_platform_brings_its_worker_and_names_the_profile(stock_config: VllmConfig) -> None:
    for _ in range(2):  # vLLM asks again for each configuration derived from the first
        SimulatedAscendPlatform.check_and_update_config(stock_config)
        assert stock_config.parallel_config.worker_cls == WORKER
    assert os.environ["ASCEND_HWPROFILE"] == "A5"


def test_platform_keeps_a_worker_that_the_user_chose(stock_config: VllmConfig) -> None:
    stock_config.parallel_config.worker_cls = "some.module.Worker"
    SimulatedAscendPlatform.check_and_update_config(stock_config)
    assert stock_config.parallel_config.worker_cls == "some.module.Worker"


def test_platform_refuses_wrong_options(stock_config: VllmConfig) -> None:
    stock_config.additional_config = {"ascend": {"ngrams": 3}}
    with pytest.raises(OptionError, match=r"ascend\.ngrams"):
        SimulatedAscendPlatform.check_and_update_config(stock_config)


def test_platform_needs_the_cpu_kernels(
    stock_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    with pytest.raises(SimulationUnavailableError, match="without its CPU kernels"):
        SimulatedAscendPlatform.check_and_update_config(stock_config)


def test_platform_leaves_vllms_own_backend_to_who_asks_for_it(stock_config: VllmConfig) -> None:
    with set_current_vllm_config(stock_config):
        path = SimulatedAscendPlatform.get_attn_backend_cls(
            AttentionBackendEnum.CPU_ATTN, question(head_size=80)
        )
    assert path == AttentionBackendEnum.CPU_ATTN.get_path()
    kind = selection.kind_of_question(question(head_size=80), "target")
    route = selection.recorded_routes()[kind]
    assert (route.class_path, route.chosen_by) == (path, "--attention-backend")

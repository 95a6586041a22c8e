"""The two halves of `FolderConnector`, driven as vLLM's scheduler and runner drive them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ascend_vllm_plugin import (
    ConnectorSettingError,
    StoredKeysError,
    folder_connector,
    model_digest,
)
from ascend_vllm_plugin.folder_connector import FolderConnector, Transfer, read_rows, write_rows
from ascend_vllm_plugin.kv_store import StoredPrompt

BLOCK = 4
PROMPT = list(range(10, 20))
"""Ten tokens: two whole blocks and two more."""


def engine(folder: Path, role: str, **changes: Any) -> Any:
    """The parts of vLLM's configuration that the connector reads."""
    hf_config = SimpleNamespace(to_dict=lambda: changes.get("config", {"hidden_size": 8}))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf_config, model="a/model", revision=None, dtype="bf16", quantization=None
        ),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        parallel_config=SimpleNamespace(
            rank=0, world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FolderConnector",
            kv_connector_module_path="ascend_vllm_plugin.folder_connector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": str(folder)},
        ),
    )


def caches() -> dict[str, torch.Tensor]:
    """Two caches of six blocks, whose own blocks are halves of vLLM's in the second one."""
    generator = torch.Generator().manual_seed(4)
    return {
        "latents": torch.randn(6, 1, BLOCK, 5, generator=generator),
        "heads": torch.randn(12, 2, BLOCK // 2, 3, generator=generator),
    }


class Engine:
    """A scheduler and a worker with a connector each."""

    def __init__(self, folder: Path, role: str, **changes: Any) -> None:
        config = engine(folder, role, **changes)
        spec = SimpleNamespace(block_size=BLOCK)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["latents", "heads"])
        groups: Any = SimpleNamespace(kv_cache_groups=[group])
        self.scheduler = FolderConnector(config, KVConnectorRole.SCHEDULER, groups)
        self.worker = FolderConnector(config, KVConnectorRole.WORKER, groups)
        self.caches = caches()
        self.worker.register_kv_caches(self.caches)

    def begin(self, request: Any, known: int = 0) -> int:
        """Schedule a request that has `known` tokens; returns how many the store has beyond."""
        external, _ = self.scheduler.get_num_new_matched_tokens(request, known)
        self.scheduler.update_state_after_alloc(request, None, external)  # type: ignore[arg-type]
        request.num_computed_tokens = known + external
        return external

    def step(self, request: Any, tokens: int, blocks: list[int], fails: bool = False) -> set[int]:
        """Compute tokens of a request; returns blocks that could not be loaded."""
        state = SimpleNamespace(get_block_ids=lambda name: (blocks,))
        output: Any = SimpleNamespace(
            num_scheduled_tokens={request.request_id: tokens}, kv_connector_block_state=state
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)  # type: ignore[arg-type]
        if fails:
            self.worker.attention_failed(RuntimeError("no such kernel"))
        self.worker.wait_for_save()
        request.num_computed_tokens += tokens
        return self.worker.get_block_ids_with_load_errors()


def request(tokens: list[int] | None = None, **changes: Any) -> Any:
    prompt = PROMPT if tokens is None else tokens
    fields = {
        "request_id": "r",
        "prompt_token_ids": prompt,
        "num_tokens": len(prompt),
        "num_computed_tokens": 0,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def stored(folder: Path) -> Engine:
    """A producer that has stored `PROMPT` from blocks 1 and 3."""
    made, asked = Engine(folder, "kv_producer"), request()
    assert made.begin(asked) == 0
    made.step(asked, len(PROMPT), [1, 3, 5])
    return made


def test_rows_go_from_the_blocks_of_one_engine_to_those_of_another(tmp_path: Path) -> None:
    producer, consumer = stored(tmp_path), Engine(tmp_path, "kv_consumer")
    untouched = {name: cache.clone() for name, cache in consumer.caches.items()}
    asked = request([*PROMPT, 1])
    assert consumer.begin(asked) == 2 * BLOCK
    assert consumer.step(asked, 3, [4, 0, 2]) == set()
    for name, size in (("latents", 1), ("heads", 2)):
        given, taken = producer.caches[name], consumer.caches[name]
        for source, place in ((1, 4), (3, 0)):
            mine = slice(size * place, size * (place + 1))
            assert torch.equal(taken[mine], given[size * source : size * (source + 1)])
            untouched[name][mine] = taken[mine]
        assert torch.equal(taken, untouched[name])


def test_what_the_engine_has_itself_is_not_loaded(tmp_path: Path) -> None:
    producer, consumer = stored(tmp_path), Engine(tmp_path, "kv_consumer")
    asked, before = request([*PROMPT, 1]), consumer.caches["latents"].clone()
    assert consumer.begin(asked, known=BLOCK) == BLOCK
    consumer.step(asked, 3, [4, 0, 2])
    assert torch.equal(consumer.caches["latents"][4], before[4])
    assert torch.equal(consumer.caches["latents"][0], producer.caches["latents"][3])
    assert Engine(tmp_path, "kv_consumer").begin(request(), known=2 * BLOCK) == 0


def test_at_least_one_token_is_computed(tmp_path: Path) -> None:
    stored(tmp_path)
    assert Engine(tmp_path, "kv_consumer").begin(request(PROMPT[: 2 * BLOCK])) == BLOCK


def test_a_prompt_in_chunks_is_stored_once_when_its_last_block_is_there(tmp_path: Path) -> None:
    producer, asked = Engine(tmp_path, "kv_producer"), request()
    producer.begin(asked)
    for tokens, files in ((5, 0), (2, 0), (3, 1), (1, 1)):
        producer.step(asked, tokens, [1, 3, 5])
        assert len(list(tmp_path.iterdir())) == files


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": SimpleNamespace(lora_name="a")},
        {"cache_salt": "s"},
        {"mm_features": [SimpleNamespace(identifier="an image")]},
        {"skip_reading_prefix_cache": True},
        {"prompt_token_ids": None},
        {"prompt_token_ids": PROMPT[:1] + PROMPT},
    ],
)
def test_other_requests_find_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    stored(tmp_path)
    assert Engine(tmp_path, "kv_consumer").begin(request(**changes)) == 0


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, 2 * BLOCK),
        ({"config": {"hidden_size": 8, "_name_or_path": "elsewhere"}}, 2 * BLOCK),
        ({"config": {"hidden_size": 16}}, 0),
        ({"cache_dtype": "fp8"}, 0),
    ],
)
def test_another_model_finds_nothing(changes: dict[str, Any], found: int, tmp_path: Path) -> None:
    stored(tmp_path)
    consumer = Engine(tmp_path, "kv_consumer", **changes)
    assert consumer.begin(request([*PROMPT, 1])) == found


def test_other_weights_in_a_file_of_the_same_size_are_another_model(tmp_path: Path) -> None:
    weights, digests = tmp_path / "model.safetensors", []
    for content in (b"\0" * 999_999, b"\0" * 500_000 + b"\1" * 499_999, b"\0" * 999_999):
        weights.write_bytes(content)
        digests.append(model_digest.weights_digest(tmp_path))
    assert digests[0] == digests[2] != digests[1]


def test_roles(tmp_path: Path) -> None:
    consumer, asked = Engine(tmp_path, "kv_consumer"), request()
    consumer.begin(asked)
    consumer.step(asked, len(PROMPT), [1, 3, 5])
    assert list(tmp_path.iterdir()) == []
    stored(tmp_path)
    assert Engine(tmp_path, "kv_producer").begin(request([*PROMPT, 1])) == 0
    assert Engine(tmp_path, "kv_both").begin(request([*PROMPT, 1])) == 2 * BLOCK


def test_a_step_that_failed_stores_nothing(tmp_path: Path) -> None:
    producer, asked = Engine(tmp_path, "kv_producer"), request()
    producer.begin(asked)
    producer.step(asked, len(PROMPT), [1, 3, 5], fails=True)
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_ended_is_forgotten(tmp_path: Path) -> None:
    producer, asked = Engine(tmp_path, "kv_both"), request()
    producer.begin(asked)
    assert producer.scheduler.request_finished(asked, []) == (False, None)
    producer.step(asked, len(PROMPT), [1, 3, 5])
    assert list(tmp_path.iterdir()) == []


def test_damaged_rows_are_reported_and_what_follows_from_them_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    both, longer = Engine(tmp_path, "kv_both"), request([*PROMPT, 1, 2, 3])
    before = both.caches["latents"].clone()
    assert both.begin(longer) == 2 * BLOCK
    assert both.step(longer, 5, [4, 0, 2, 5]) == {4, 0}
    assert torch.equal(both.caches["latents"], before)
    assert [one.name for one in tmp_path.iterdir()] == [path.name + ".refused"]
    assert both.step(request(), 1, [1]) == set()  # the next step begins anew


def test_a_full_disk_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        folder_connector.logger, "error", lambda text, *values: said.append(text % values)
    )

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ascend_vllm_plugin.kv_store.KeyStore.write", full)
    stored(tmp_path)
    assert said == ["a prompt of 8 tokens is not stored: [Errno 28] No space left on device"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows.pop("heads"), "layer heads has None"),
        (lambda rows: rows.update(heads=rows["heads"].half()), r"layer heads has \(torch.float16"),
        (lambda rows: rows.update(latents=rows["heads"]), r"layer latents has .*\(8, 2, 3\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    change: Any, reason: str
) -> None:
    mine, transfer = caches(), Transfer(StoredPrompt("p", 8, "m"), 0, 8, (1, 3))
    rows = read_rows(mine, transfer, BLOCK)
    change(rows)
    before = {name: cache.clone() for name, cache in mine.items()}
    with pytest.raises(StoredKeysError, match=reason):
        write_rows(mine, rows, transfer, BLOCK)
    assert all(torch.equal(mine[name], before[name]) for name in mine)


def test_caches_with_block_tables_of_their_own_are_refused(tmp_path: Path) -> None:
    groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(), SimpleNamespace()])
    with pytest.raises(ConnectorSettingError, match="used with 2 groups"):
        FolderConnector(engine(tmp_path, "kv_both"), KVConnectorRole.WORKER, groups)


def test_vllms_factory_makes_it_and_keeps_caches_in_one_group(tmp_path: Path) -> None:
    config = engine(tmp_path, "kv_both").kv_transfer_config
    assert KVConnectorFactory.get_connector_class(config) is FolderConnector
    assert not KVConnectorFactory.supports_hma_config(config)

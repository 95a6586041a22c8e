"""A KV connector through a folder that moves every cache of a model, latents and index rows too.

vLLM's example connector takes a cache of latents for one of heads unless its metadata is of a class
of vLLM's own, and learns of a cache through the attention call of its layer, which the cache of an
indexer and the context of a draft do not have. This one goes by the caches that vLLM registers and
by the blocks of a request:

    --kv-transfer-config '{"kv_connector": "FolderConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "ascend_vllm_plugin.folder_connector",
        "kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}'

A producer stores the whole blocks of a prompt once the last of them is computed, in however many
chunks; a consumer loads the longest stored prefix that it finds. What cannot be used, files of
another model or damaged ones (`kv_store`), is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from ascend_vllm_plugin.errors import ConnectorSettingError, StoredKeysError
from ascend_vllm_plugin.kv_store import (
    KeyStore,
    StoredPrompt,
    digest_of,
    prefix_digests,
    store_folder,
)
from ascend_vllm_plugin.kv_transfer import TransferWindows
from ascend_vllm_plugin.model_digest import model_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.ascend_vllm_plugin")


@attrs.frozen
class Transfer:
    """Rows of a prompt between the store and the caches.

    Attributes:
        prompt: the stored one.
        first: first token to move, which begins a block.
        end: token after the last one, which begins a block.
        blocks: the request's blocks, from its first token on.
    """

    prompt: StoredPrompt
    first: int
    end: int
    blocks: tuple[int, ...] = ()

    def touched(self, block_size: int) -> tuple[int, ...]:
        """Blocks of the tokens to move."""
        return self.blocks[self.first // block_size : self.end // block_size]

    def slots(self, block_size: int) -> torch.Tensor:
        """[end - first] slot of each token to move."""
        blocks = torch.tensor(self.touched(block_size), dtype=torch.int64)
        return (blocks[:, None] * block_size + torch.arange(block_size)).flatten()


@attrs.frozen(slots=False)
class Transfers(KVConnectorMetadata):
    """What the workers are to move in a step: loads before it, saves after it."""

    loads: tuple[Transfer, ...]
    saves: tuple[Transfer, ...]


class FolderConnector(TransferWindows, KVConnectorBase_V1):
    """See this module; the scheduler and each worker have an instance of their own.

    Raises:
        ConnectorSettingError: the folder does not exist, there are unknown settings, or vLLM keeps
            the caches of the model in several groups, with block tables of their own.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = self._kv_transfer_config, vllm_config.parallel_config
        self._rank, self._ranks = parallel.rank, parallel.world_size
        self._store = KeyStore(store_folder(transfer.kv_connector_extra_config), self._ranks)
        self._loads, self._saves = transfer.is_kv_consumer, transfer.is_kv_producer
        (group, *others) = kv_cache_config.kv_cache_groups
        if others:
            found = f"used with {1 + len(others)} groups of caches"
            raise ConnectorSettingError("FolderConnector", found, "models with one group")
        self._block_size = group.kv_cache_spec.block_size
        self._unsaved: dict[str, Request] = {}
        self._matches: dict[str, Transfer] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._failed_blocks: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._model = model_digest(vllm_config, group.layer_names)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is stored."""
        return False

    # In the scheduler's process.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens that the store has beyond those that the engine has; its step loads them."""
        self._matches.pop(request.request_id, None)
        stored = self._stored_prefix(request)
        # One token at least is computed, or nothing would be sampled.
        limit = (request.num_tokens - 1) // self._block_size * self._block_size
        end = 0 if stored is None else min(stored.tokens, limit)
        if stored is None or end <= num_computed_tokens:
            return 0, False
        self._matches[request.request_id] = Transfer(stored, num_computed_tokens, end)
        return end - num_computed_tokens, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has blocks: from now on it may be loaded, and saved once it is computed."""
        if not num_external_tokens:
            self._matches.pop(request.request_id, None)
        if self._saves and request.prompt_token_ids:
            self._unsaved[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        """What the workers are to move in this step."""
        scheduled, state = scheduler_output.num_scheduled_tokens, _Blocks(scheduler_output)
        loads = [
            attrs.evolve(self._matches.pop(name), blocks=state.of(name))
            for name in scheduled
            if name in self._matches
        ]
        saves = []
        for name, tokens in scheduled.items():
            request = self._unsaved.get(name)
            if request is None or request.num_computed_tokens + tokens < self._whole(request):
                continue
            del self._unsaved[name]
            prompt = self._to_store(request)
            if prompt is not None:
                saves.append(Transfer(prompt, 0, prompt.tokens, state.of(name)))
        return Transfers(tuple(loads), tuple(saves))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        self._unsaved.pop(request.request_id, None)
        self._matches.pop(request.request_id, None)
        return False, None

    def _whole(self, request: Request) -> int:
        """Tokens in the whole blocks of a prompt."""
        return len(request.prompt_token_ids or ()) // self._block_size * self._block_size

    def _names(self, request: Request) -> list[str]:
        """Names of the prefixes of a prompt, with what else its keys depend on."""
        lora = None if request.lora_request is None else request.lora_request.lora_name
        media = [feature.identifier for feature in request.mm_features]
        seed = digest_of(self._model, lora, request.cache_salt, media)
        return prefix_digests(seed, request.prompt_token_ids or (), self._block_size)

    def _stored_prefix(self, request: Request) -> StoredPrompt | None:
        if not self._loads or request.skip_reading_prefix_cache:
            return None
        try:
            return self._store.find(self._model, self._names(request), self._block_size)
        except StoredKeysError as error:
            logger.error("%s; the prompt is computed", error)
            return None

    def _to_store(self, request: Request) -> StoredPrompt | None:
        """A prompt that has whole blocks and is not stored yet."""
        if not self._whole(request):
            return None
        prompt = StoredPrompt(self._names(request)[-1], self._whole(request), self._model)
        try:
            return None if self._store.holds(prompt) else prompt
        except StoredKeysError as error:
            logger.error("%s; it is replaced", error)
            return prompt

    # In the worker's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the caches of all layers, [blocks, heads, tokens of a block, row]."""
        super().register_kv_caches(kv_caches)
        self._caches = dict(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step; what it saves waits for its end."""
        super().bind_connector_metadata(connector_metadata)
        self._failed_blocks = set()
        self._pending += [functools.partial(self._save, one) for one in self._transfers().saves]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Fill the blocks of this step's requests from the store."""
        with self.transfer_gate.transfer():
            for transfer in self._transfers().loads:
                self._load(transfer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there before the step begins."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Caches are read after the step, those without an attention call, too."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose file could not be used; `kv_load_failure_policy` says what happens."""
        return set(self._failed_blocks)

    def _transfers(self) -> Transfers:
        return cast(Transfers, self._get_connector_metadata())

    def _load(self, transfer: Transfer) -> None:
        try:
            stored = self._store.read(transfer.prompt, self._rank)
            write_rows(self._caches, stored, transfer, self._block_size)
        except StoredKeysError as error:
            logger.error("%s; it is put aside, and kv_load_failure_policy decides", error)
            self._failed_blocks.update(transfer.touched(self._block_size))
            self._put_aside(transfer)

    def _put_aside(self, transfer: Transfer) -> None:
        try:
            self._store.put_aside(transfer.prompt, self._rank)
        except OSError as error:
            logger.error("a damaged file stays where it is: %s", error)

    def _save(self, transfer: Transfer) -> None:
        if self._failed_blocks.intersection(transfer.blocks):
            return  # computed from rows that could not be loaded
        rows = read_rows(self._caches, transfer, self._block_size)
        try:
            self._store.write(transfer.prompt, self._rank, rows)
        except OSError as error:
            logger.error("a prompt of %d tokens is not stored: %s", transfer.end, error)


class _Blocks:
    """The blocks of the requests of a step."""

    def __init__(self, scheduler_output: SchedulerOutput) -> None:
        self._state: Any = scheduler_output.kv_connector_block_state

    def of(self, request_id: str) -> tuple[int, ...]:
        """Blocks of a request, from its first token on."""
        (blocks,) = self._state.get_block_ids(request_id)
        return tuple(blocks)


def read_rows(
    caches: Mapping[str, torch.Tensor], transfer: Transfer, block_size: int
) -> dict[str, torch.Tensor]:
    """Copies of the rows of a request, [tokens, heads, row] of each cache."""
    slots = transfer.slots(block_size)
    return {name: cache[_places(cache, slots)].clone() for name, cache in caches.items()}


def write_rows(
    caches: Mapping[str, torch.Tensor],
    stored: Mapping[str, torch.Tensor],
    transfer: Transfer,
    block_size: int,
) -> None:
    """Write stored rows to the blocks of a request.

    Args:
        caches: name of the layer -> [blocks, heads, tokens of a block, row].
        stored: name of the layer -> [tokens of the prompt, heads, row].
        transfer: which of them go where.
        block_size: tokens of a block of the request.

    Raises:
        StoredKeysError: a layer is missing, or its rows are of another shape or type; nothing has
            been written then.
    """
    for name, cache in caches.items():
        _check_rows(name, cache, stored.get(name), transfer.prompt)
    slots = transfer.slots(block_size)
    for name, cache in caches.items():
        rows = stored[name][transfer.first : transfer.end]
        cache[_places(cache, slots)] = rows.to(cache.device)


def _check_rows(
    name: str, cache: torch.Tensor, rows: torch.Tensor | None, prompt: StoredPrompt
) -> None:
    wanted = (cache.dtype, (prompt.tokens, cache.shape[1], cache.shape[3]))
    found = None if rows is None else (rows.dtype, tuple(rows.shape))
    if found != wanted:
        raise StoredKeysError(prompt.name, f"layer {name} has {found}, its cache takes {wanted}")


def _places(cache: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
    """Index of the rows of slots in a cache, whose own blocks may be parts of vLLM's."""
    size = cache.shape[2]
    return slots // size, slice(None), slots % size

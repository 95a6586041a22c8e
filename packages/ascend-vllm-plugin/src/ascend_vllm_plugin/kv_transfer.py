"""vLLM's KV connectors with a transfer window around each attention call.

Put `Windowed` before the name of a connector of vLLM and name this module:

    --kv-transfer-config '{"kv_connector": "WindowedExampleConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ascend_vllm_plugin.kv_transfer",
        "kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}'

vLLM calls a connector before a step (`start_load_kv`), around the attention of each layer
(`wait_for_layer_load`, `save_kv_layer`) and after the step (`wait_for_save`), but tells it nothing
about an attention call that fails. With this module

- each attention call is a window of `ascend_attn_backends.attention_transfer_window`, whose
  listeners learn of its start, end or failure; the draft flash backend opens its own;
- loads begin and layers are saved only while no window is open; what a connector moves in threads
  of its own it can hold back with `self.transfer_gate.transfer()`;
- layers are saved after the step, and only if the whole step succeeded. Without that, a worker that
  fails in the middle of a prompt leaves some of its layers in the store, and an engine that finds
  them takes the prompt for complete.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from ascend_attn_backends import attention_transfer_window, transfer_listener
from ascend_vllm_plugin.errors import UnknownConnectorError
from ascend_vllm_plugin.kv_store import store_folder
from ascend_vllm_plugin.transfer_gate import TransferGate

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1 as _Connector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig
else:
    _Connector = object

WINDOWED: Final = "Windowed"
"""Put before the name of a connector."""

ATTENTION_CALLS: Final = ("forward", "forward_mqa", "forward_mha")
"""What vLLM calls on an attention implementation: layers of heads, and the two parts of MLA."""

FOLDER_MODULE: Final = "ascend_vllm_plugin.folder_connector"
"""Where `FolderConnector` is."""

_OTHERS: Final = "other connectors"

_log = logging.getLogger("vllm.ascend_vllm_plugin")


class TransferWindows(_Connector):
    """Goes before a connector among the bases of a class; see this module.

    Attributes:
        transfer_gate: open while no attention call runs.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.transfer_gate = TransferGate()
        self._layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
        self._listening = ExitStack()
        self._pending: list[Callable[[], None]] = []
        self._failure: BaseException | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Begin to open windows: vLLM calls this in the worker once its layers have caches."""
        super().register_kv_caches(kv_caches)
        self._listening.close()
        self._listening.enter_context(transfer_listener(self))
        for layer in self._layers.values():
            open_windows(getattr(layer, "impl", None))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: what an earlier one left is no part of it."""
        self._pending, self._failure = [], None
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load before the attention of the step."""
        with self.transfer_gate.transfer():
            self._inner().start_load_kv(forward_context, **kwargs)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Remember a layer; it stays as it is until the next step."""
        save = self._inner().save_kv_layer
        self._pending.append(functools.partial(save, *args, **kwargs))

    def wait_for_save(self) -> None:
        """Save the layers of a step that succeeded, drop those of one that did not.

        vLLM calls this on its way out of a step that raised as well.
        """
        failure = self._failure or sys.exception()
        pending, self._pending, self._failure = self._pending, [], None
        if failure is None:
            with self.transfer_gate.transfer():
                for save in pending:
                    save()
        elif pending:
            _log.warning("%d saves of keys are dropped: the step failed", len(pending))
        self._inner().wait_for_save()

    def shutdown(self) -> None:
        """Listen no more."""
        self._listening.close()
        self._inner().shutdown()

    def _inner(self) -> Any:
        """The connector that comes after; vLLM declares parts of it abstract or untyped."""
        return super()

    def attention_started(self) -> None:
        """An attention call begins: hold transfers back."""
        self.transfer_gate.attention_started()

    def attention_ended(self) -> None:
        """An attention call has ended: let transfers go on."""
        self.transfer_gate.attention_ended()

    def attention_failed(self, error: BaseException) -> None:
        """An attention call has failed: nothing of this step is to be saved."""
        self._failure = error
        self.transfer_gate.attention_failed(error)


def open_windows(impl: Any) -> None:
    """Have the attention calls of an implementation run in windows, once and not within another."""
    if impl is None or getattr(impl, "opens_transfer_window", False):
        return
    for name in ATTENTION_CALLS:
        if hasattr(impl, name):
            setattr(impl, name, _in_window(getattr(impl, name)))
    impl.opens_transfer_window = True


def _in_window(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def windowed(*args: Any, **kwargs: Any) -> Any:
        with attention_transfer_window():
            return call(*args, **kwargs)

    return windowed


def connector_reasons(
    vllm_config: VllmConfig, *, latent: bool, sparse: bool, draft: bool
) -> Iterator[str]:
    """Why the KV connector of an engine cannot serve a layer: what is allowed instead.

    vLLM hands a connector the cache of each attention call that it makes, and asks it for the
    cache of every layer (vllm/model_executor/layers/attention/kv_transfer_utils.py). Connectors
    tell a cache of latents by vLLM's own metadata class, and silently move wrong values of a cache
    whose metadata is of another one (kv_connector/v1/example_connector.py). `FolderConnector` goes
    by the registered caches instead; of prompts that ranks share it has no whole one.

    Args:
        vllm_config: of the engine, which has a connector.
        latent: the layer's cache holds latents (MLA).
        sparse: the layer attends to keys that an indexer chose.
        draft: the layer belongs to a draft model.

    Raises:
        ConnectorSettingError: a setting of `FolderConnector` is wrong.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is not None and transfer.kv_connector_module_path == FOLDER_MODULE:
        store_folder(transfer.kv_connector_extra_config)
        if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
            yield "no FolderConnector with context parallelism: no rank has a whole prompt"
        return
    if latent:
        yield f"only FolderConnector with latent attention: {_OTHERS} take its cache for heads"
    if sparse:
        yield f"only FolderConnector with sparse attention: {_OTHERS} miss the indexer's keys"
    if draft:
        yield f"only FolderConnector with a draft model: {_OTHERS} miss its keys of a prompt"


def __getattr__(name: str) -> type:
    """The class `Windowed<name of a connector>`."""
    inner = name.removeprefix(WINDOWED)
    if inner == name or not inner:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Its support for several kinds of cache depends on its name, which would be another one.
    if inner == "MultiConnector":
        raise UnknownConnectorError(name, f"a MultiConnector of {WINDOWED} connectors")
    try:
        connector = KVConnectorFactory.get_connector_class_by_name(inner)
    except ValueError as error:
        allowed = f"{WINDOWED} and a connector that vLLM has, such as {WINDOWED}ExampleConnector"
        raise UnknownConnectorError(name, allowed) from error
    made = type(name, (TransferWindows, connector), {"__module__": __name__})
    globals()[name] = made
    return made

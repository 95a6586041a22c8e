"""The routing table of a model that vLLM has just loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from vllm.logger import init_logger

from ascend_attn_backends import BackendRequest, Selection
from ascend_vllm_plugin.compat import require_supported_vllm
from ascend_vllm_plugin.environment import routing_file, simulated_profile
from ascend_vllm_plugin.routing import RoutingRow, RoutingTable
from ascend_vllm_plugin.selection import LayerKind, Route, recorded_routes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.ascend_vllm_plugin")


def report_routing(vllm_config: VllmConfig) -> RoutingTable:
    """Log the routing of every attention layer; write it to `ASCEND_VLLM_ROUTING_FILE` if set."""
    table = routing_table(vllm_config)
    logger.info("%s", table.render())
    path = routing_file()
    if path is not None:
        table.write(path)
        logger.info("routing table written to %s", path)
    return table


def routing_table(vllm_config: VllmConfig) -> RoutingTable:
    """Group the attention layers that vLLM built by kind and backend."""
    groups: dict[tuple[LayerKind, type, int | None], list[str]] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if hasattr(layer, "attn_backend"):
            window = getattr(layer, "sliding_window", None)
            key = (kind_of_layer(layer), layer.attn_backend, window)
            groups.setdefault(key, []).append(name)
    routes = recorded_routes()
    return RoutingTable(
        mode="simulated",
        profile=simulated_profile().soc_name,
        vllm=require_supported_vllm(),
        model=str(vllm_config.model_config.model),
        speculation=_speculation(vllm_config),
        rows=tuple(
            _row(backend, window, tuple(layers), routes.get(kind))
            for (kind, backend, window), layers in groups.items()
        ),
    )


def kind_of_layer(layer: Any) -> LayerKind:
    """The kind of an attention layer that was built, as its question had it."""
    attn_type = getattr(layer, "attn_type", "decoder")
    return LayerKind(
        head_size=layer.head_size,
        kv_cache_dtype=layer.kv_cache_dtype,
        has_sliding_window=getattr(layer, "sliding_window", None) is not None,
        attn_type=str(getattr(attn_type, "value", attn_type)),
        use_mla=layer.attn_backend.is_mla(),
    )


def _row(
    backend: type, window: int | None, layers: tuple[str, ...], route: Route | None
) -> RoutingRow:
    selection = None if route is None else route.selection
    span = "full attention" if window is None else f"sliding window of {window} keys"
    return RoutingRow(
        kind=span if selection is None else f"{selection.request.role}, {span}",
        layers=layers,
        backend=_backend_name(backend, selection),
        backend_class=f"{backend.__module__}.{backend.__qualname__}",
        chosen_by="the model" if route is None else route.chosen_by,
        request={} if selection is None else _request_fields(selection.request),
        verdicts=() if selection is None else selection.verdicts,
    )


def _backend_name(backend: Any, selection: Selection | None) -> str:
    if selection is None or selection.backend is None:
        return str(backend.get_name())
    return selection.backend


def _request_fields(request: BackendRequest) -> Mapping[str, Any]:
    return {**attrs.asdict(request), "dtype": request.dtype_name}


def _speculation(vllm_config: VllmConfig) -> Mapping[str, Any] | None:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    return {
        "method": speculative.method,
        "drafter": speculative.model,
        "tokens": speculative.num_speculative_tokens,
    }

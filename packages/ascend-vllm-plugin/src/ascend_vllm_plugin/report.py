"""The routing table of a model that vLLM has just loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from vllm.logger import init_logger

from ascend_attn_backends import (
    AscendSFAIndexerBackend,
    BackendRequest,
    NoBackendError,
    Selection,
    Verdict,
)
from ascend_vllm_plugin.adapters.draft_flash import DraftFlashBackend, plan_counters
from ascend_vllm_plugin.adapters.indexer import IndexerBackend
from ascend_vllm_plugin.compat import require_supported_vllm
from ascend_vllm_plugin.environment import (
    ROUTING_FILE,
    explaining,
    judged_profile,
    routing_file,
)
from ascend_vllm_plugin.errors import EnvironmentVariableError, PluginError
from ascend_vllm_plugin.facts import plain
from ascend_vllm_plugin.modes import running_mode
from ascend_vllm_plugin.plan_reports import PlanReports
from ascend_vllm_plugin.routing import DraftPlans, RoutingRow, RoutingTable
from ascend_vllm_plugin.selection import LayerKind, Route, recorded_routes

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

_Group: TypeAlias = tuple[LayerKind, type, int | None]
"""Layers of one row: their kind, their backend, their sliding window."""

logger = init_logger("vllm.ascend_vllm_plugin")


class RoutingReport:
    """A worker's answer on the routing of its layers."""

    vllm_config: Any
    model_runner: Any

    def routing(self) -> str:
        """The routing table as JSON, with the plans so far: `LLM.collective_rpc("routing")`."""
        return routing_table(self.vllm_config, self.model_runner.get_model()).to_json()


class RoutingReports(RoutingReport):
    """The same, and in the log when the model is loaded; stands before a worker of vLLM."""

    rank: int
    _plans: PlanReports | None = None
    _refused: str | None = None

    def routing(self) -> str:
        """The same; `{"refused": message}` in a process that explains and was refused a layer."""
        if self._refused is not None:
            return json.dumps({"refused": self._refused})
        return super().routing()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, then log the routing of its layers and write the routing file.

        A process that explains keeps a refusal for `routing`: raised here, in a worker of its own,
        it would reach nobody but the log.
        """
        try:
            super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        except (NoBackendError, PluginError) as error:
            if not explaining():
                raise
            self._refused = str(error)
            return
        if self.rank == 0:
            table = report_routing(self.vllm_config, self.model_runner.get_model())
            if table.plans is not None:
                self._plans = PlanReports(table, plan_counters, routing_file())

    def shutdown(self) -> None:
        """Say what plans the drafts have used, then stop as vLLM's worker does."""
        if self._plans is not None:
            logger.info("%s", self._plans.stop().render())
            self._plans = None
        super().shutdown()  # type: ignore[misc]


def report_routing(vllm_config: VllmConfig, target: nn.Module) -> RoutingTable:
    """Log the routing of every attention layer; write it to `ASCEND_VLLM_ROUTING_FILE` if set.

    Args:
        vllm_config: the engine's configuration, with the layers that vLLM built.
        target: the target model; layers of no part of it are the draft's.

    Raises:
        EnvironmentVariableError: the file cannot be written.
    """
    table = routing_table(vllm_config, target)
    logger.info("%s", table.render())
    path = routing_file()
    if path is not None:
        try:
            table.write(path)
        except OSError as error:
            allowed = f"a file that can be written ({error})"
            raise EnvironmentVariableError(ROUTING_FILE, str(path), allowed) from error
        logger.info("routing table written to %s", path)
    return table


def routing_table(vllm_config: VllmConfig, target: nn.Module) -> RoutingTable:
    """Group the attention layers that vLLM built by kind and backend; see `report_routing`."""
    targets = {id(module) for module in target.modules()}
    groups: dict[_Group, dict[str, Any]] = {}
    indexers: dict[str, list[str]] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        role = "target" if id(layer) in targets else "draft"
        if hasattr(layer, "attn_backend"):
            window = getattr(layer, "sliding_window", None)
            group = (kind_of_layer(layer, role), layer.attn_backend, window)
            groups.setdefault(group, {})[name] = layer
        elif _is_indexer(layer):
            indexers.setdefault(role, []).append(name)
    routes = recorded_routes()
    return RoutingTable(
        mode=running_mode(),
        profile=judged_profile().soc_name,
        vllm=require_supported_vllm(),
        model=str(vllm_config.model_config.model),
        speculation=_speculation(vllm_config),
        rows=(
            *(_row(group, tuple(layers), routes.get(group[0])) for group, layers in groups.items()),
            *(_indexer_row(role, tuple(names)) for role, names in indexers.items()),
        ),
        plans=_draft_plans(groups),
    )


def kind_of_layer(layer: Any, role: str) -> LayerKind:
    """The kind of an attention layer that was built, as its question had it."""
    return LayerKind(
        role=role,
        head_size=layer.head_size,
        kv_cache_dtype=layer.kv_cache_dtype,
        has_sliding_window=getattr(layer, "sliding_window", None) is not None,
        attn_type=plain(getattr(layer, "attn_type", "decoder")),
        use_mla=layer.attn_backend.is_mla(),
        compress_ratio=getattr(layer, "compress_ratio", 1),
    )


def _row(group: _Group, layers: tuple[str, ...], route: Route | None) -> RoutingRow:
    kind, backend, window = group
    selection = None if route is None else route.selection
    span = "full attention" if window is None else f"sliding window of {window} keys"
    if kind.compress_ratio > 1:
        span += f" and a key for every {kind.compress_ratio} tokens"
    return RoutingRow(
        role=kind.role,
        kind=f"{kind.role}, {span}",
        layers=layers,
        backend=_backend_name(backend, selection),
        backend_class=f"{backend.__module__}.{backend.__qualname__}",
        chosen_by="the model" if route is None else route.chosen_by,
        request={} if selection is None else _request_fields(selection.request),
        verdicts=() if selection is None else selection.verdicts,
        gate=() if selection is None or kind.role == "target" else selection.gate,
    )


def _is_indexer(layer: Any) -> bool:
    """Whether a layer is the cache of an indexer: it has a backend, and nobody was asked for it."""
    return hasattr(layer, "get_attn_backend") and issubclass(
        layer.get_attn_backend(), IndexerBackend
    )


def _indexer_row(role: str, layers: tuple[str, ...]) -> RoutingRow:
    name = AscendSFAIndexerBackend.name
    return RoutingRow(
        role=role,
        kind=f"{role}, indexer",
        layers=layers,
        backend=name,
        backend_class=f"{IndexerBackend.__module__}.{IndexerBackend.__qualname__}",
        chosen_by="the model",
        request={},
        verdicts=(Verdict(name, ()),),  # a refusal would have stopped the model
    )


def _draft_plans(groups: Mapping[_Group, Mapping[str, Any]]) -> DraftPlans | None:
    users = [
        layer
        for (_, backend, _), layers in groups.items()
        if issubclass(backend, DraftFlashBackend)
        for layer in layers.values()
    ]
    if not users:
        return None
    geometries = {
        (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.sliding_window)
        for layer in users
    }
    return DraftPlans(layers=len(users), per_step=len(geometries), **plan_counters())


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

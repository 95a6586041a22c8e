"""From vLLM's question to the pure selection of ascend-attn-backends, with a record of answers.

vLLM asks once for each distinct (backend, `AttentionSelectorConfig`) of a process, while it
builds the model and so before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from ascend_attn_backends import BackendRequest, NoBackendError, Selection, select_backend
from ascend_attn_ops import Refusal
from ascend_vllm_plugin import compat
from ascend_vllm_plugin.environment import judged_profile
from ascend_vllm_plugin.facts import plain, request_from, role_of_current_layer
from ascend_vllm_plugin.kv_transfer import connector_reasons

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

ADAPTERS: Mapping[str, str] = {
    "standard": "ascend_vllm_plugin.adapters.standard.StandardBackend",
    "standard_dcp": "ascend_vllm_plugin.adapters.standard_dcp.StandardDcpBackend",
    "fa3": "ascend_vllm_plugin.adapters.fa3.FABackend",
    "mla": "ascend_vllm_plugin.adapters.mla.MLABackend",
    "mla_dcp": "ascend_vllm_plugin.adapters.mla.MLADcpBackend",
    "mla_pcp": "ascend_vllm_plugin.adapters.mla.MLAPcpBackend",
    "sfa": "ascend_vllm_plugin.adapters.sfa.SFABackend",
    "sfa_dcp": "ascend_vllm_plugin.adapters.sfa.SFADcpBackend",
    "sfa_pcp": "ascend_vllm_plugin.adapters.sfa.SFAPcpBackend",
    "dsa": "ascend_vllm_plugin.adapters.dsa_caches.DSABackend",
    "draft_flash": "ascend_vllm_plugin.adapters.draft_flash.DraftFlashBackend",
}
"""Backend of ascend-attn-backends -> its adapter to vLLM's interface."""

NOT_ADAPTED: Mapping[str, str] = {
    "use_batch_invariant": "results that may depend on the batch (VLLM_BATCH_INVARIANT unset)",
    "use_adaptive_verification": "query lengths that the host knows",
    "use_rswa": "plain sliding windows",
}
"""Fields of `AttentionSelectorConfig` that no adapter handles -> what it takes instead.

Not among them: `use_per_head_quant_scales`. Such scales belong to a quantised cache, which the
backends refuse by its dtype; nothing reads them beside an unquantised one."""

ONE_KIND_OF_SHARING = (
    "ranks that share prompts (--prefill-context-parallel-size) or keys "
    "(--decode-context-parallel-size), not both"
)
"""Where prompts are shared every rank has all keys: no adapter merges parts there."""


@attrs.frozen
class LayerKind:
    """What a layer and the question that vLLM asked for it have in common.

    Target and draft may ask the same question and get different answers: `role` is part of it.
    """

    role: str
    head_size: int
    kv_cache_dtype: str
    has_sliding_window: bool
    attn_type: str
    use_mla: bool
    compress_ratio: int = 1


@attrs.frozen
class Route:
    """One answer to vLLM.

    Attributes:
        class_path: the class that vLLM is to use.
        chosen_by: `selection`, or the option with which the user decided.
        selection: every backend's verdict; None when the user decided.
    """

    class_path: str
    chosen_by: str
    selection: Selection | None


_routes: dict[LayerKind, Route] = {}


def recorded_routes() -> Mapping[LayerKind, Route]:
    """The answers that this process has given so far."""
    return dict(_routes)


def record(config: AttentionSelectorConfig, route: Route) -> None:
    """Remember an answer for the routing table."""
    _routes[kind_of_question(config, role_of_current_layer())] = route


def record_layer(kind: LayerKind, route: Route) -> None:
    """Remember the answer for a layer that vLLM builds without asking."""
    _routes[kind] = route


def route_of(request: BackendRequest) -> Route:
    """The route of a layer that vLLM builds without asking for its backend.

    Raises:
        NoBackendError: nobody takes the layer; the message has every reason.
    """
    selection = among_adapted(select_backend(request, judged_profile()))
    if selection.backend is None:
        raise NoBackendError(selection.as_text())
    return Route(ADAPTERS[selection.backend], "selection", selection)


def kind_of_question(config: AttentionSelectorConfig, role: str) -> LayerKind:
    """The kind of layer that vLLM asks about; the question itself has no role."""
    return LayerKind(
        role=role,
        head_size=config.head_size,
        kv_cache_dtype=config.kv_cache_dtype or "auto",
        has_sliding_window=config.has_sliding_window,
        attn_type=plain(config.attn_type),
        use_mla=config.use_mla,
    )


def select(
    config: AttentionSelectorConfig,
    vllm_config: VllmConfig,
    num_heads: int | None,
    adapters: Mapping[str, str] = ADAPTERS,
) -> Route:
    """Ask every backend of ascend-attn-backends.

    Args:
        config: vLLM's question.
        vllm_config: the configuration that it belongs to.
        num_heads: query heads on this rank, where vLLM says so.
        adapters: backend -> class path of its adapter on the platform that asks.

    Raises:
        NoBackendError: nobody takes the layer; the message has every reason.
    """
    request = request_from(config, vllm_config, num_heads)
    selection = among_adapted(select_backend(request, judged_profile()), adapters)
    unadapted = adapter_refusals(config, vllm_config)
    if selection.backend is None or unadapted:
        reasons = [f"  ascend-vllm-plugin: {refusal}" for refusal in unadapted]
        raise NoBackendError("\n".join([selection.as_text(), *reasons]))
    return Route(adapters[selection.backend], "selection", selection)


def among_adapted(selection: Selection, adapters: Mapping[str, str] = ADAPTERS) -> Selection:
    """The selection among backends with an adapter; the others get that as their refusal."""
    verdicts = tuple(
        attrs.evolve(verdict, refusals=(_no_adapter(verdict.backend, adapters),))
        if verdict.accepted and verdict.backend not in adapters
        else verdict
        for verdict in selection.verdicts
    )
    chosen = next((verdict.backend for verdict in verdicts if verdict.accepted), None)
    return attrs.evolve(selection, verdicts=verdicts, backend=chosen)


def _no_adapter(backend: str, adapters: Mapping[str, str]) -> Refusal:
    return Refusal(
        rule="vllm.adapter",
        parameter="backend",
        found=backend,
        allowed="backends with an adapter in this version: " + ", ".join(adapters),
        source="ascend_vllm_plugin.selection",
    )


def adapter_refusals(config: AttentionSelectorConfig, vllm_config: VllmConfig) -> list[Refusal]:
    """What vLLM asks for and no adapter of this version handles."""
    reasons = [item for item in NOT_ADAPTED.items() if getattr(config, item[0])]
    parallel = vllm_config.parallel_config
    if min(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        reasons.append(("use_pcp", ONE_KIND_OF_SHARING))
    if config.use_kv_connector:
        is_draft = role_of_current_layer(vllm_config) == "draft"
        unserved = connector_reasons(
            vllm_config, latent=config.use_mla, sparse=config.use_sparse, draft=is_draft
        )
        reasons += [("use_kv_connector", allowed) for allowed in unserved]
    return [
        Refusal(
            rule=f"vllm.{field}",
            parameter=field,
            found="True",
            allowed=allowed,
            source="ascend_vllm_plugin.selection",
        )
        for field, allowed in reasons
    ]


def require_attention_layers(vllm_config: VllmConfig) -> None:
    """Refuse models with layers that vLLM would run past this selection.

    vLLM never asks a platform about linear attention and state spaces; on a CPU it runs them, on
    an NPU nobody would.

    Raises:
        NoBackendError: the model has such layers, and the user did not ask for vLLM's backends.
    """
    model = vllm_config.model_config
    if model is None or not (model.is_hybrid or model.is_attention_free):
        return
    if user_choice(vllm_config.attention_config.backend) is not None:
        return
    refusal = Refusal(
        rule="model.layer_types",
        parameter="architectures",
        found=f"{', '.join(model.architectures)}, with layers of linear attention or state space",
        allowed="models whose layers all attend to keys and values",
        source="ascend_attn_backends/backends.toml",
    )
    raise NoBackendError(f"no backend for the model {model.model}:\n  {refusal}")


def option_of_current_layer() -> str:
    """The option with which a user chooses a backend for the layer that vLLM is building."""
    if role_of_current_layer() == "draft":
        return "speculative_config.attention_backend"
    return "--attention-backend"


def require_our_backend(selected: AttentionBackendEnum | None) -> None:
    """Refuse a backend of vLLM that the user named where none of them runs.

    Raises:
        NoBackendError: it is not ours.
    """
    if selected is not None and selected.name != compat.OUR_BACKEND_NAME:
        raise NoBackendError(
            f"attention backend: found {selected.name}; allowed on an NPU: "
            f"{compat.OUR_BACKEND_NAME}, or none"
        )


def user_choice(selected: AttentionBackendEnum | None) -> str | None:
    """Name of the CPU backend of vLLM that the user named, None to let us select.

    Raises:
        NoBackendError: the user named a backend that neither side has on a CPU.
    """
    if selected is None or selected.name == compat.OUR_BACKEND_NAME:
        return None
    if selected.name in compat.VLLM_CPU_BACKENDS:
        return selected.name
    allowed = ", ".join(sorted(compat.VLLM_CPU_BACKENDS | {compat.OUR_BACKEND_NAME}))
    raise NoBackendError(
        f"attention backend: found {selected.name}; allowed in simulate mode: {allowed}, or none"
    )

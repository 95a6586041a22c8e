"""The kinds of layers of a target, its indexer and its draft, each with its selection."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from ascend_attn_ops import Refusal
from ascend_hwprofile import HardwareProfile

from ..draft_gate import GateTerm
from ..dsa import AscendDSAIndexerBackend, DsaCompression
from ..indexer import AscendSFAIndexerBackend
from ..request import BackendRequest
from ..selection import Verdict, backend_classes, select_backend
from .compressed_layers import compressions
from .model_config import ModelConfig


@attrs.frozen(kw_only=True)
class ExplainedLayer:
    """One kind of layer of a model.

    Attributes:
        role: ``"target"``, ``"draft"`` or ``"indexer"``.
        kind: Architecture and window, for people.
        count: Layers of this kind.
        backend: Name of the chosen backend, or None.
        verdicts: Every backend's answer.
        architecture_refusals: Why this version or product cannot run the architecture at all.
        gate: The terms of the draft gate; for draft layers.
        relaxations: Terms that a wide gate set aside for the choice.
    """

    role: str
    kind: str
    count: int
    backend: str | None
    verdicts: tuple[Verdict, ...]
    architecture_refusals: tuple[Refusal, ...] = ()
    gate: tuple[GateTerm, ...] = ()
    relaxations: tuple[GateTerm, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The layer as plain data; ``relaxations`` only where there are some."""
        verdicts = [
            {"backend": verdict.backend, "refusals": [_short(r) for r in verdict.refusals]}
            for verdict in self.verdicts
        ]
        data = {
            "role": self.role,
            "kind": self.kind,
            "count": self.count,
            "backend": self.backend,
            "verdicts": verdicts,
        }
        if self.relaxations:
            data["relaxations"] = [_short(term.refusal()) for term in self.relaxations]
        return data


def explain_models(
    target: ModelConfig,
    draft: ModelConfig | None,
    profile: HardwareProfile,
    *,
    runner: str = "v1",
    eager: bool = False,
    draft_flash_attn: str = "strict",
    training_consistency: bool = False,
    graph_mode: str = "none",
) -> list[ExplainedLayer]:
    """Every kind of layer and its backend: target, indexer, draft.

    Args:
        target: Configuration of the target.
        draft: Configuration of the draft; with it speculative decoding counts as configured.
        profile: Product that they run on.
        runner: Model runner of the engine, ``"v1"`` or ``"v2"``.
        eager: Whether the draft runs eager.
        draft_flash_attn: Mode of the draft gate.
        training_consistency: Whether attention must be the one that training computes.
        graph_mode: What the engine captures in graphs; see :class:`BackendRequest`.

    Raises:
        ModelConfigError: A configuration lacks a fact.
    """
    facts: dict[str, Any] = {
        "speculative": draft is not None,
        "runner": runner,
        "draft_eager": eager,
        "draft_flash_attn": draft_flash_attn,
        "training_consistency": training_consistency,
        "graph_mode": graph_mode,
        "target_model_type": target.model_type,
        "draft_architecture": None if draft is None else draft.architecture,
    }
    layers = _attention_layers(target, "target", facts, profile)
    if target.use_sparse:
        layers.append(_indexer(target, facts, profile))
    if target.use_compress:
        layers += _compressed_indexers(target, facts, profile)
    if draft is not None:
        layers += _attention_layers(draft, "draft", facts, profile)
    return layers


def _attention_layers(
    config: ModelConfig, role: str, facts: dict[str, Any], profile: HardwareProfile
) -> list[ExplainedLayer]:
    layers = range(config.num_layers)
    kinds = [config.other_kind(layer) for layer in layers]
    keys = compressions(config) if config.use_compress else [None] * len(layers)
    found = Counter(
        _request(config, layer, role, facts, keys[layer])
        for layer in layers
        if kinds[layer] is None
    )
    others = Counter(kind for kind in kinds if kind is not None)
    return [
        *(_attention_layer(request, count, profile) for request, count in found.items()),
        *(_other_layer(kind, count, role) for kind, count in others.items()),
    ]


def _other_layer(kind: str, count: int, role: str) -> ExplainedLayer:
    """Layers without keys and values of every token, such as linear attention."""
    refusal = Refusal(
        rule="layer_type",
        parameter="layer_types",
        found=repr(kind),
        allowed="full, sliding or indexed attention",
        source="config.json",
    )
    verdicts = tuple(Verdict(name, (refusal,)) for name in backend_classes())
    return ExplainedLayer(role=role, kind=kind, count=count, backend=None, verdicts=verdicts)


def _attention_layer(
    request: BackendRequest, count: int, profile: HardwareProfile
) -> ExplainedLayer:
    selection = select_backend(request, profile)
    return ExplainedLayer(
        role=request.role,
        kind=_kind(selection.architecture, request),
        count=count,
        backend=selection.backend,
        verdicts=selection.verdicts,
        architecture_refusals=selection.architecture_refusals,
        gate=selection.gate if request.role == "draft" else (),
        relaxations=selection.relaxations,
    )


def _kind(architecture: str | None, request: BackendRequest) -> str:
    parts = [architecture or "unknown architecture"]
    if request.compress_ratio > 1:
        parts.append(f"compressed by {request.compress_ratio}")
    if request.compressed_top_k is not None:
        parts.append(f"top {request.compressed_top_k}")
    if request.sliding_window is not None:
        parts.append(f"sliding window {request.sliding_window}")
    if not request.causal:
        parts.append("not causal")
    return ", ".join(parts)


def _request(
    config: ModelConfig,
    layer: int,
    role: str,
    facts: dict[str, Any],
    compression: DsaCompression | None,
) -> BackendRequest:
    is_block_draft = role == "draft" and "DFlash" in (config.architecture or "")
    window, causal = (
        _block_draft_mask(config, layer) if is_block_draft else (config.window_of(layer), True)
    )
    return BackendRequest(
        role=role,
        use_mla=config.use_mla,
        use_sparse=config.use_sparse,
        use_compress=config.use_compress,
        compress_ratio=1 if compression is None else compression.ratio,
        compressed_top_k=None if compression is None else compression.top_k,
        head_size=config.head_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        sliding_window=window,
        causal=causal,
        has_sinks=config.has_sinks,
        logits_soft_cap=config.logits_soft_cap,
        **facts,
    )


def _block_draft_mask(config: ModelConfig, layer: int) -> tuple[int | None, bool]:
    """(window, causal) of a layer of a DFlash draft.

    Source: vLLM 0.30 model_executor/models/qwen3_dflash.py. ``is_causal``, then
    ``dflash_config.causal``, then the layer's type decide; ``use_swa`` makes every layer slide
    where no layer does by its type.
    """
    options = config.section("dflash_config")
    types = config.layer_types if config.data.get("layer_types") is not None else ()
    sliding = bool(types) and types[layer] == "sliding_attention"
    causal = config.data.get("is_causal")
    causal = options.get("causal") if causal is None else causal
    causal = sliding if causal is None else bool(causal)
    if not (sliding or (options.get("use_swa", False) and "sliding_attention" not in types)):
        return None, causal
    window = options.get("swa_window_size")
    if window is None:
        return config.number("sliding_window"), causal
    return config.whole_number("swa_window_size", window), causal


def _indexer(
    config: ModelConfig, facts: dict[str, Any], profile: HardwareProfile
) -> ExplainedLayer:
    """The layers that choose keys; others reuse their choice."""
    request = BackendRequest(
        use_mla=True,
        use_sparse=True,
        head_size=config.number("index_head_dim"),
        num_heads=config.number("index_n_heads"),
        num_kv_heads=1,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        **facts,
    )
    verdict = Verdict(
        AscendSFAIndexerBackend.name, tuple(AscendSFAIndexerBackend.refusals(request, profile))
    )
    count = sum(kind == "full" for kind in config.indexer_types())
    return _explained_indexer(f"indexer, top {config.number('index_topk')}", count, verdict)


def _compressed_indexers(
    config: ModelConfig, facts: dict[str, Any], profile: HardwareProfile
) -> list[ExplainedLayer]:
    """The layers that choose compressed keys."""
    choosing = Counter(found for found in compressions(config) if found and found.overlap)
    layers = []
    for compression, count in choosing.items():
        request = BackendRequest(
            use_mla=True,
            use_compress=True,
            compress_ratio=compression.ratio,
            compressed_top_k=compression.top_k,
            head_size=config.number("index_head_dim"),
            num_heads=config.number("index_n_heads"),
            num_kv_heads=1,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            **facts,
        )
        verdict = Verdict(
            AscendDSAIndexerBackend.name, tuple(AscendDSAIndexerBackend.refusals(request, profile))
        )
        kind = f"indexer, compressed by {compression.ratio}, top {compression.top_k}"
        layers.append(_explained_indexer(kind, count, verdict))
    return layers


def _explained_indexer(kind: str, count: int, verdict: Verdict) -> ExplainedLayer:
    return ExplainedLayer(
        role="indexer",
        kind=kind,
        count=count,
        backend=verdict.backend if verdict.accepted else None,
        verdicts=(verdict,),
    )


def _short(refusal: Refusal) -> dict[str, str]:
    return {"rule": refusal.rule, "found": refusal.found, "allowed": refusal.allowed}

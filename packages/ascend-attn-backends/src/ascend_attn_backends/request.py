"""What a backend is asked for: the facts about a layer that decide who computes it."""

from __future__ import annotations

import attrs
import torch

_ROLES = ("target", "draft")
_RUNNERS = ("v1", "v2")
_GATE_MODES = ("strict", "wide", "off")
GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
"""Values of :attr:`BackendRequest.graph_mode`, from vLLM's ``CUDAGraphMode``."""


@attrs.frozen(kw_only=True)
class BackendRequest:
    """One kind of layer of a model, as far as the choice of a backend is concerned.

    Attributes:
        role: ``"target"`` or ``"draft"``: whose layer it is in speculative decoding.
        use_mla: Multi-head latent attention.
        use_sparse: Keys are chosen by an indexer (GLM-5, DeepSeek-V3.2).
        use_compress: Keys are compressed (DeepSeek-V4).
        compress_ratio: Tokens per compressed key; 1 in a layer that has the sliding window alone.
        compressed_top_k: Compressed keys that an indexer chooses for a token; None: all of them.
        head_size: Elements per head D.
        num_heads: Query heads N on this rank.
        num_kv_heads: Key/value heads KN on this rank.
        dtype: dtype of queries, keys and values.
        kv_cache_dtype: ``"auto"``, or the name of the cache's dtype.
        block_size: Tokens per cache block.
        sliding_window: Keys that a token sees, its own included; None for all.
        causal: False where layers also attend to later tokens.
        has_sinks: The layer has learnable attention sinks.
        has_multimodal_prefix: Image tokens attend in both directions inside their own range.
        has_alibi: The layer adds position biases (ALiBi) to the scores.
        logits_soft_cap: Bound that scores are squashed to, or None.
        attn_type: ``"decoder"``, ``"encoder"``, ``"encoder_only"`` or ``"encoder_decoder"``.
        context_parallel_size: Ranks that share one request's keys, decode and prefill together.
        prefill_context_parallel_size: Of these, the ranks that also share one request's queries.
        per_head_quant_scales: Queries, keys and values have one quantisation scale per head.
        batch_invariant: Results must not depend on what else is in the batch.
        training_consistency: Attention must be the one that training computes (reinforcement
            learning); no backend sets this aside, so a layer that ``fa3`` refuses has none.
        graph_mode: What the engine captures in graphs: ``"none"``, ``"piecewise"`` (attention is
            left out), ``"full"``, ``"full_decode_only"`` or ``"full_and_piecewise"``; the names are
            those of vLLM's ``CUDAGraphMode``.
        speculative: Speculative decoding is configured.
        runner: Model runner of the engine, ``"v1"`` or ``"v2"``.
        draft_eager: The draft model runs eager, without captured graphs.
        target_model_type: ``model_type`` of the target's configuration, e.g. ``"glm_moe_dsa"``.
        draft_architecture: First of the draft's ``architectures``, e.g. ``"DFlash2DraftModel"``.
        draft_flash_attn: Who may use the draft backend: ``"strict"``, ``"wide"`` or ``"off"``; see
            :func:`ascend_attn_backends.judge_draft_gate`.
        provider: Provider of the operators: None for the product's own, ``"cpu"`` or
            ``"reference"`` where the product is simulated. Only these take float32.

    Raises:
        ValueError: A count is below 1, or a role, runner or mode is unknown; names the field.
    """

    role: str = attrs.field(default="target", validator=attrs.validators.in_(_ROLES))
    use_mla: bool = False
    use_sparse: bool = False
    use_compress: bool = False
    compress_ratio: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    compressed_top_k: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    head_size: int = attrs.field(validator=attrs.validators.ge(1))
    num_heads: int = attrs.field(validator=attrs.validators.ge(1))
    num_kv_heads: int = attrs.field(validator=attrs.validators.ge(1))
    dtype: torch.dtype = attrs.field(validator=attrs.validators.instance_of(torch.dtype))
    kv_cache_dtype: str = "auto"
    block_size: int = attrs.field(default=128, validator=attrs.validators.ge(1))
    sliding_window: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    causal: bool = True
    has_sinks: bool = False
    has_multimodal_prefix: bool = False
    has_alibi: bool = False
    logits_soft_cap: float | None = None
    attn_type: str = "decoder"
    context_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    prefill_context_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    per_head_quant_scales: bool = False
    batch_invariant: bool = False
    training_consistency: bool = False
    graph_mode: str = attrs.field(default="none", validator=attrs.validators.in_(GRAPH_MODES))
    speculative: bool = False
    runner: str = attrs.field(default="v1", validator=attrs.validators.in_(_RUNNERS))
    draft_eager: bool = False
    target_model_type: str | None = None
    draft_architecture: str | None = None
    draft_flash_attn: str = attrs.field(
        default="strict", validator=attrs.validators.in_(_GATE_MODES)
    )
    provider: str | None = None

    @property
    def dtype_name(self) -> str:
        """``"bfloat16"`` for ``torch.bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

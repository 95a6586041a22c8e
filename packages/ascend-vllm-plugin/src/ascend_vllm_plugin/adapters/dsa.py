"""The compressed backend (DeepSeek-V4) for vLLM: an attention layer in the place of vLLM's.

vLLM's model asks nobody for a backend. Its attention layer for CPUs holds fp8 rows and calls
kernels of vLLM; `patches/compressed_attention.py` puts the layer here in its place. Parameters and
their names, and so the loading of weights, are those of vLLM's base class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.nn.functional import rms_norm
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from ascend_attn_backends import (
    AscendDSABackend,
    AscendDSACompressor,
    AscendDSAImpl,
    AscendDSAIndexerBackend,
    AscendDSAIndexerImpl,
    AscendDSAMetadata,
    AscendDSAMetadataBuilder,
    CompressorWeights,
    DsaCompression,
    DsaTables,
)
from ascend_attn_ops import Refusal
from ascend_vllm_plugin import selection
from ascend_vllm_plugin.adapters.dsa_caches import (
    CacheStep,
    DSABackend,
    IndexCache,
    StateCache,
    WindowCache,
    block_bytes,
)
from ascend_vllm_plugin.adapters.layer import layer_request, refusal
from ascend_vllm_plugin.environment import judged_profile
from ascend_vllm_plugin.errors import LayerRefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


DSA, HALF = AscendDSABackend.name, ("float16", "bfloat16")


class CompressedAttention(DeepseekV4Attention):
    """A layer of DeepSeek-V4 on the compressed backend.

    Attributes:
        compression: how the layer compresses its keys; None for the window alone.
        layer: what computes it.
        chooser: what chooses its keys, where it has an indexer.
        builder: of the metadata; that of an index cache differs in the size of the states' blocks.

    Raises:
        NoBackendError: nobody takes the layer; the message has every reason.
        LayerRefusedError: the backend does not take the layer's indexer, or vLLM's model does not
            take the engine's settings.
    """

    compression: Any
    indexer: Any  # of vLLM, as the next ones: optional modules, and modules that it calls tensors
    compressor: Any
    rotary_emb: Any
    topk_indices_buffer: Any
    wo_a: Any
    wq_b: Any
    wo_b: Any
    backend_cls = DSABackend
    swa_backend_cls = DSABackend
    use_fp8_ds_mla_layout = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        top_k = None if self.indexer is None else self.indexer.topk_tokens
        self.compression = (
            None if self.compress_ratio == 1 else DsaCompression(self.compress_ratio, top_k)
        )
        self.head_size, self.sliding_window = self.head_dim, self.window_size
        self.attn_backend, self.kv_cache_dtype = DSABackend, "auto"
        self._select(config)
        self._take_caches(config)
        for linear in self._linears_read_as_they_are():
            linear.quant_method.process_weights_after_loading = _keep_as_loaded
        self.layer = AscendDSAImpl(
            self.n_local_heads, self.scale, self.compression, self.attn_sink.data, self.head_dim
        )
        self.chooser: Any = None if self.indexer is None else self._chooser()
        self.builder = AscendDSAMetadataBuilder(
            config.cache_config.block_size,
            num_heads=self.n_local_heads,
            compression=self.compression,
            window=self.window_size,
            head_size=self.head_dim,
            compressed_block_size=config.cache_config.block_size,
            num_spec_tokens=config.num_speculative_tokens,
        )

    def _chooser(self) -> AscendDSAIndexerImpl:
        """What chooses keys by the scores of the layer's indexer."""
        return AscendDSAIndexerImpl(self.indexer.n_head, self.compression, self.indexer.head_dim)

    def _select(self, config: VllmConfig) -> None:
        """Ask the backends, and record the answer for the routing table."""
        top_k = None if self.compression is None else self.compression.top_k
        compression = {"compress_ratio": self.compress_ratio, "compressed_top_k": top_k}
        shared = {"use_mla": True, "use_compress": True, "num_kv_heads": 1, **compression}
        request = layer_request(
            head_size=self.head_dim,
            num_heads=self.n_local_heads,
            sliding_window=self.window_size,
            has_sinks=True,
            **shared,
        )
        kind = selection.LayerKind(
            role=request.role,
            head_size=self.head_size,
            kv_cache_dtype=self.kv_cache_dtype,
            has_sliding_window=True,
            attn_type=request.attn_type,
            use_mla=True,
            compress_ratio=self.compress_ratio,
        )
        refusals = model_refusals(config)
        if refusals:
            raise LayerRefusedError(DSA, refusals)
        selection.record_layer(kind, selection.route_of(request))
        if self.indexer is None:
            return
        asked = layer_request(
            head_size=self.indexer.head_dim, num_heads=self.indexer.n_head, **shared
        )
        refusals = AscendDSAIndexerBackend.refusals(asked, judged_profile())
        if refusals:
            raise LayerRefusedError(AscendDSAIndexerBackend.name, refusals)

    def _take_caches(self, config: VllmConfig) -> None:
        """Give the caches our form; vLLM has built them, under names that its model fixes."""
        dtype: Any = config.model_config.dtype
        size = block_bytes(config, self.head_dim)
        self.kv_cache_torch_dtype = self.swa_cache_layer.dtype = dtype
        self.swa_cache_layer.__class__ = WindowCache
        if self.indexer is not None:
            cache: Any = self.indexer.k_cache
            cache.__class__, cache.bytes_per_block = IndexCache, size
            cache.dtype, cache.head_dim = dtype, self.indexer.head_dim
        for compressor in self._compressors():
            state = compressor.state_cache
            state.__class__ = StateCache
            state.block_size = size // (state.state_dim * state.dtype.itemsize)

    def _compressors(self) -> list[Any]:
        """The layer's own and its indexer's, where there are any."""
        found = [self.compressor] if self.compressor is not None else []
        return found if self.indexer is None else [*found, self.indexer.compressor]

    def _linears_read_as_they_are(self) -> list[Any]:
        """Projections whose weights are read here; vLLM would pack them for its CPU kernels."""
        return [self.wo_a, *(compressor.fused_wkv_wgate for compressor in self._compressors())]

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Rows of compressed keys; None where the layer has the window alone."""
        if self.compression is None:
            return None
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size * self.compress_ratio,
            num_kv_heads=1,
            head_size=self.head_dim,
            dtype=self.kv_cache_torch_dtype,
            tokens_per_state=self.compress_ratio,
        )

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """As many as there are."""
        return num_heads

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of hidden states [T, H] at positions [T], projected back to [T, H]."""
        result: torch.Tensor = torch.ops.ascend_vllm.compressed_attention(
            hidden_states, positions, self.prefix
        )
        return result

    def attend(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `forward`; a step without metadata measures memory, and its result is 0."""
        if not isinstance(get_forward_context().attn_metadata, dict):
            return torch.zeros_like(hidden)
        residual, kv = self.fused_wqa_wkv(hidden)[0].split([self.q_lora_rank, self.head_dim], -1)
        residual, kv = self.q_norm(residual), self.kv_norm(kv)
        heads = self.wq_b(residual).view(-1, self.n_local_heads, self.head_dim)
        query = rms_norm(heads, (self.head_dim,), eps=self.eps)
        query, _ = self.rotary_emb.forward_native(positions, query)
        rows, _ = self.rotary_emb.forward_native(positions, kv[:, None])
        if self.compressor is not None:
            self._compress(hidden, self.compressor, self.kv_cache, self._step())
        if self.indexer is not None:
            self._choose(hidden, residual, positions)
        output = torch.empty_like(query)
        self.forward_mqa(query, rows[:, 0], positions, output)
        return self._o_proj(output, positions)

    def forward_mqa(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Write this step's rows of the window, and attend.

        Args:
            q: [T, N, 512] rotated queries.
            kv: [T, 512] normalised and rotated rows.
            positions: unused; the metadata has them.
            output: [T, N, 512], written in place.
        """
        step, window = self._step(), self.swa_cache_layer.kv_cache[:, None]
        self.layer.write_kv(kv, window, step.slot_mapping)
        compressed = None if self.compressor is None else self.kv_cache[:, None]
        chosen = None if self.indexer is None else self.topk_indices_buffer[: q.shape[0], None]
        self.layer.forward(q, window, step, output, compressed, chosen)

    def _choose(
        self, hidden: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Leave the keys that the tokens attend to in their buffer."""
        indexer, step = self.indexer, self._index_step()
        self._compress(hidden, indexer.compressor, indexer.k_cache.kv_cache, step)
        query = indexer.wq_b(residual)[0].view(-1, indexer.n_head, indexer.head_dim)
        query, _ = self.rotary_emb.forward_native(positions, query)
        weights = self.chooser.scaled_weights(indexer.weights_proj(hidden)[0])
        chosen = self.chooser.forward(query, weights, indexer.k_cache.kv_cache[:, None], step)
        self.topk_indices_buffer[: step.num_tokens] = chosen[:, 0]

    def _compress(
        self,
        hidden: torch.Tensor,
        compressor: Any,
        cache: torch.Tensor,
        step: AscendDSAMetadata,
    ) -> None:
        """Make the keys of groups that end in this step, and write them to their cache."""
        if step.compressed is None:
            return
        kv, gate = compressor.fused_wkv_wgate.weight.chunk(2)
        weights = CompressorWeights(kv, gate, compressor.ape, compressor.norm.weight)
        ours = AscendDSACompressor(
            self.compression,
            weights,
            compressor.head_dim,
            self.rope_head_dim,
            compressor.rms_norm_eps,
        )
        values, scores = compressor.state_cache.kv_cache.chunk(2, -1)
        angles = self._angles(step.compressed.compressor.key_positions)
        keys = ours.forward(hidden, (values, scores), angles, step)
        ours.write_kv(keys, cache[:, None], step)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [num_keys, 64] of compressed keys, each angle twice in a row."""
        table = self.rotary_emb.cos_sin_cache[positions].repeat_interleave(2, -1)
        cos, sin = table.to(self.kv_cache_torch_dtype).chunk(2, -1)
        return cos, sin

    def _step(self) -> AscendDSAMetadata:
        """Metadata of this step over the keys that the layer attends to."""
        return self._built(self.prefix, self.compressor)

    def _index_step(self) -> AscendDSAMetadata:
        """Metadata of this step over the index keys, whose blocks are others."""
        return self._built(self.indexer.k_cache.prefix, self.indexer.compressor)

    def _built(self, cache: str, compressor: Any) -> AscendDSAMetadata:
        """Metadata over one cache; built by the first layer of its kind that asks."""
        steps: Any = get_forward_context().attn_metadata
        window: CacheStep = steps[self.swa_cache_layer.prefix]
        if compressor is None:
            return window.once(None, lambda: self.builder.build(window.batch))
        state = compressor.state_cache
        groups: tuple[CacheStep, CacheStep] = steps[cache], steps[state.prefix]

        def build() -> AscendDSAMetadata:
            builder = attrs.evolve(self.builder, state_block_size=state.block_size)
            compressed, states = (group.batch.block_table for group in groups)
            return builder.build(window.batch, DsaTables(compressed=compressed, state=states))

        return window.once((self.compression, *map(id, groups)), build)

    def _o_proj(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take the rotation out of attention [T, N, 512] and project it back to [T, H]."""
        rows, _ = self.rotary_emb.forward_native(positions, o, inverse=True)
        grouped = rows.reshape(len(rows), self.n_local_groups, -1)
        weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        result: torch.Tensor = self.wo_b(torch.einsum("tgd,grd->tgr", grouped, weight).flatten(1))
        return result


def model_refusals(config: VllmConfig) -> list[Refusal]:
    """What vLLM's model or its memory takes no part in, whatever the backend takes."""
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    refusals = []
    if dtype not in HALF:
        kernels = "vLLM's kernels of the residual streams (hc_pre_fused_cpu) take no other"
        refusals.append(refusal(DSA, "dtype", dtype, f"{' or '.join(HALF)}: {kernels}"))
    if config.model_config.quantization is not None:
        allowed = "none: the layer reads the weights of wo_a and of the compressors as they are"
        refusals.append(refusal(DSA, "quantization", config.model_config.quantization, allowed))
    ranks = config.parallel_config.decode_context_parallel_size
    if ranks > 1:
        allowed = "1: vLLM keeps no sliding window where ranks share keys (SlidingWindowSpec)"
        refusals.append(refusal(DSA, "decode_context_parallel_size", str(ranks), allowed))
    if config.kv_transfer_config is not None:
        connector = str(config.kv_transfer_config.kv_connector)
        allowed = "none: no connector knows the states of compressors"
        refusals.append(refusal(DSA, "kv_connector", connector, allowed))
    return refusals


def _keep_as_loaded(layer: torch.nn.Module) -> None:
    """In the place of packing weights for vLLM's CPU kernels."""


@torch.library.custom_op("ascend_vllm::compressed_attention", mutates_args=())
def compressed_attention(
    hidden: torch.Tensor, positions: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """`CompressedAttention.attend` as an operator, which a compiled model calls as a whole.

    Args:
        hidden: [T, H].
        positions: [T] int64.
        layer_name: the layer, whose caches are written.
    """
    attended: torch.Tensor = (
        get_forward_context().no_compile_layers[layer_name].attend(hidden, positions)
    )
    return attended


@compressed_attention.register_fake
def _(hidden: torch.Tensor, positions: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(hidden)

"""Argument record of mla_prolog_v2."""

from __future__ import annotations

import math

import attrs
import torch

from ...arguments import arguments_record, mutated, parameters
from ..mla_prolog_v3.arguments import MlaPrologV3Arguments


@arguments_record
class MlaPrologV2Arguments:
    """Everything of MLA before the attention, version 2: the formula of mla_prolog_v3.

    The quantisation follows from the tensors: int8 ``weight_uq_qr`` alone is version 3's
    weight_quant_mode 1, int8 ``token_x`` its mode 2; with ``quant_scale_ckv`` the first has its
    caches quantised per channel, the second per tensor with an int8 query.

    Attributes:
        token_x: (T, He) or (B, S, He) bfloat16 or int8, He = 7168.
        weight_dq: (He, Hcq), Hcq = 1536, FRACTAL_NZ on the NPU.
        weight_uq_qr: (Hcq, N * (D + Dr)), FRACTAL_NZ on the NPU.
        weight_uk: (N, D, Hckv) bfloat16, ND; D = 128, Hckv = 512.
        weight_dkv_kr: (He, Hckv + Dr), FRACTAL_NZ on the NPU.
        rmsnorm_gamma_cq: (Hcq,) bfloat16.
        rmsnorm_gamma_ckv: (Hckv,) bfloat16.
        rope_sin: (T, Dr) or (B, S, Dr) bfloat16; sin comes before cos.
        rope_cos: As rope_sin.
        cache_index: (T,) or (B, S) int64 slots; a negative one is skipped (decision).
        kv_cache: (num_blocks, block_size, 1, Hckv), block_size 16 or 128.
        kr_cache: (num_blocks, block_size, 1, Dr).
        dequant_scale_x: (T, 1) or (B * S, 1) float32.
        dequant_scale_w_dq: (1, Hcq) float32.
        dequant_scale_w_uq_qr: (1, N * (D + Dr)) float32.
        dequant_scale_w_dkv_kr: (1, Hckv + Dr) float32.
        quant_scale_ckv: One element or (1, Hckv) float32.
        quant_scale_ckr: (1, Dr) float32.
        smooth_scales_cq: (1, Hcq) float32.
        rmsnorm_epsilon_cq: Epsilon of the query norm.
        rmsnorm_epsilon_ckv: Epsilon of the latent norm.
        cache_mode: ``PA_BSND`` or ``PA_NZ``.

    Returns query, query_rope, kv_cache, kr_cache (updated in place and returned; the torch operator
    returns copies, because torch does not let a custom operator return an input) and
    dequant_scale_q_nope (T, N, 1), or zeros of shape (1,) without an int8 query.

    Source: op-plugin docs npu_mla_prolog_v2; torch_npu 2.13 meta kernel.
    """

    token_x: torch.Tensor
    weight_dq: torch.Tensor
    weight_uq_qr: torch.Tensor
    weight_uk: torch.Tensor
    weight_dkv_kr: torch.Tensor
    rmsnorm_gamma_cq: torch.Tensor
    rmsnorm_gamma_ckv: torch.Tensor
    rope_sin: torch.Tensor
    rope_cos: torch.Tensor
    cache_index: torch.Tensor
    kv_cache: torch.Tensor = mutated()
    kr_cache: torch.Tensor = mutated()
    dequant_scale_x: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_w_dq: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_w_uq_qr: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_w_dkv_kr: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale_ckv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale_ckr: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    smooth_scales_cq: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    rmsnorm_epsilon_cq: float = attrs.field(default=1e-5, kw_only=True)
    rmsnorm_epsilon_ckv: float = attrs.field(default=1e-5, kw_only=True)
    cache_mode: str = attrs.field(default="PA_BSND", kw_only=True)

    @property
    def lead(self) -> tuple[int, ...]:
        """(T,) or (B, S)."""
        return tuple(self.token_x.shape[:-1])

    @property
    def tokens(self) -> int:
        """T, or B * S."""
        return math.prod(self.lead)

    @property
    def weight_quant_mode(self) -> int:
        """Version 3's number of the weight quantisation."""
        if self.token_x.dtype == torch.int8:
            return 2
        return int(self.weight_uq_qr.dtype == torch.int8)

    @property
    def kv_cache_quant_mode(self) -> int:
        """Version 3's number of the cache quantisation."""
        if self.quant_scale_ckv is None:
            return 0
        return 1 if self.weight_quant_mode == 2 else 2

    def as_v3(self) -> MlaPrologV3Arguments:
        """The version 3 call that computes the same."""
        fields = {p.name: getattr(self, p.name) for p in parameters(MlaPrologV2Arguments)}
        return MlaPrologV3Arguments(
            **fields,
            weight_quant_mode=self.weight_quant_mode,
            kv_cache_quant_mode=self.kv_cache_quant_mode,
            query_quant_mode=int(self.kv_cache_quant_mode == 1),
        )

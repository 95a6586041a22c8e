"""Argument record of mla_prolog_v3."""

from __future__ import annotations

import math

import attrs
import torch

from ...arguments import arguments_record, mutated


@arguments_record
class MlaPrologV3Arguments:
    """Everything of MLA before the attention: projections, norms, rotary parts, cache writes.

    Per token ``x`` (He,)::

        c_q      = rms_norm(x @ weight_dq, gamma_cq)                     (Hcq,)
        q, q_r   = (c_q @ weight_uq_qr) per head [D | Dr], * qc_qr_scale  (N, D), (N, Dr)
        query    = q[n] @ weight_uk[n]                                   (N, Hckv)
        c_kv,k_r = x @ weight_dkv_kr as [Hckv | Dr]
        kv_cache[slot] = rms_norm(c_kv, gamma_ckv) * kc_scale ; kr_cache[slot] = rope(k_r)

    The rotary embedding takes interleaved pairs and returns half order (interleave_rope). Where
    exactly the two scales enter is (unverified): here qc_qr_scale multiplies the projected query,
    not query_norm, and kc_scale the normalised latent (decision). Note that sin comes before cos.

    Attributes:
        token_x: (T, He) or (B, S, He); bfloat16, int8, or an 8-bit float on Ascend950.
        weight_dq: (He, Hcq), FRACTAL_NZ on the NPU.
        weight_uq_qr: (Hcq, N * (D + Dr)), FRACTAL_NZ on the NPU.
        weight_uk: (N, D, Hckv) bfloat16, ND.
        weight_dkv_kr: (He, Hckv + Dr), FRACTAL_NZ on the NPU.
        rmsnorm_gamma_cq: (Hcq,) bfloat16.
        rmsnorm_gamma_ckv: (Hckv,) bfloat16.
        rope_sin: (T, Dr) or (B, S, Dr) bfloat16, rank of token_x.
        rope_cos: As rope_sin.
        kv_cache: (num_blocks, block_size, 1, Hckv), written in place; last dimension 656 with
            kv_cache_quant_mode 3; (B, S, 1, Hckv) or (T, 1, Hckv) in the unpaged modes.
        kr_cache: The same with Dr.
        cache_index: int64 slots (T,) or (B, S) in [0, num_blocks * block_size), one per block in
            the PA_BLK modes, absent in the unpaged ones. A negative slot is skipped (decision).
        dequant_scale_x: (T, 1) or (B * S, 1) float32; e8m0 (.., He / 32) for mxfp8.
        dequant_scale_w_dq: (1, Hcq).
        dequant_scale_w_uq_qr: (1, N * (D + Dr)).
        dequant_scale_w_dkv_kr: (1, Hckv + Dr).
        quant_scale_ckv: One element (mode 1), or (1, Hckv) (mode 2; documents show it for mode 1
            too): multiplied before rounding to int8.
        quant_scale_ckr: (1, Dr), mode 2.
        smooth_scales_cq: (1, Hcq), multiplied before c_q is quantised per token.
        actual_seq_len: int32 prefix sums (B,), PA_BLK modes with (T, He).
        k_nope_clip_alpha: (1,), kv_cache_quant_mode 3 only.
        rmsnorm_epsilon_cq: Epsilon of the query norm.
        rmsnorm_epsilon_ckv: Epsilon of the latent norm.
        cache_mode: PA_BSND, PA_NZ, PA_BLK_BSND, PA_BLK_NZ, BSND or TND.
        query_norm_flag: Also return query_norm.
        weight_quant_mode: 0 none, 1 weight_uq_qr int8, 2 all int8, 3 mxfp8, 4 fp8, 5 hifloat8.
        kv_cache_quant_mode: 0 none, 1 per tensor, 2 per channel, 3 per token and group.
        query_quant_mode: 1 with kv_cache_quant_mode 1: query int8 per token and head.
        ckvkr_repo_mode: 1: both caches in one, kv_cache_quant_mode 3.
        quant_scale_repo_mode: 1: scales beside the data, kv_cache_quant_mode 3.
        tile_size: Group of kv_cache_quant_mode 3.
        qc_qr_scale: Correction of the query.
        kc_scale: Correction of the latent.
        token_x_dtype: torch_npu's number of a dtype that torch lacks (hifloat8 as uint8).
        weight_dq_dtype: As token_x_dtype.
        weight_uq_qr_dtype: As token_x_dtype.
        weight_dkv_kr_dtype: As token_x_dtype.
        kv_cache_dtype: As token_x_dtype.

    Returns query (.., N, Hckv), query_rope (.., N, Dr), dequant_scale_q_nope (T, N, 1) float32 with
    query_quant_mode 1, query_norm (.., Hcq) and dequant_scale_q_norm (T, 1) when asked for; absent
    ones have shape (0,) (CANN before 8.5 uses (1,)).

    Source: op-plugin docs npu_mla_prolog_v3; torch_npu 2.13 meta kernel.
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
    kv_cache: torch.Tensor = mutated()
    kr_cache: torch.Tensor = mutated()
    cache_index: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_x: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_w_dq: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_w_uq_qr: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_w_dkv_kr: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale_ckv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale_ckr: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    smooth_scales_cq: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_len: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    k_nope_clip_alpha: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    rmsnorm_epsilon_cq: float = attrs.field(default=1e-5, kw_only=True)
    rmsnorm_epsilon_ckv: float = attrs.field(default=1e-5, kw_only=True)
    cache_mode: str = attrs.field(default="PA_BSND", kw_only=True)
    query_norm_flag: bool = attrs.field(default=False, kw_only=True)
    weight_quant_mode: int = attrs.field(default=0, kw_only=True)
    kv_cache_quant_mode: int = attrs.field(default=0, kw_only=True)
    query_quant_mode: int = attrs.field(default=0, kw_only=True)
    ckvkr_repo_mode: int = attrs.field(default=0, kw_only=True)
    quant_scale_repo_mode: int = attrs.field(default=0, kw_only=True)
    tile_size: int = attrs.field(default=128, kw_only=True)
    qc_qr_scale: float = attrs.field(default=1.0, kw_only=True)
    kc_scale: float = attrs.field(default=1.0, kw_only=True)
    token_x_dtype: int | None = attrs.field(default=None, kw_only=True)
    weight_dq_dtype: int | None = attrs.field(default=None, kw_only=True)
    weight_uq_qr_dtype: int | None = attrs.field(default=None, kw_only=True)
    weight_dkv_kr_dtype: int | None = attrs.field(default=None, kw_only=True)
    kv_cache_dtype: int | None = attrs.field(default=None, kw_only=True)

    @property
    def lead(self) -> tuple[int, ...]:
        """(T,) or (B, S)."""
        return tuple(self.token_x.shape[:-1])

    @property
    def tokens(self) -> int:
        """T, or B * S."""
        return math.prod(self.lead)

    @property
    def is_paged(self) -> bool:
        """Whether the caches are paged."""
        return self.cache_mode.startswith("PA")

    @property
    def by_page(self) -> bool:
        """Whether cache_index has one entry per block."""
        return self.cache_mode.startswith("PA_BLK")

    @property
    def is_nz(self) -> bool:
        """Whether a cache block is stored in FRACTAL_NZ order."""
        return self.cache_mode.endswith("NZ")

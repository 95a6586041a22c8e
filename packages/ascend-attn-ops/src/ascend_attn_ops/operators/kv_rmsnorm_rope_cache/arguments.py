"""Argument record of kv_rmsnorm_rope_cache."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record, mutated


@arguments_record
class KvRmsnormRopeCacheArguments:
    """Normalise and rotate the latent KV of MLA and write it into the caches.

    The first 512 elements of ``kv`` are RMS-normalised and go to ``ckv_cache``; the last 64 are
    rotated (pairs (2i, 2i + 1) in, half order out) and go to ``k_cache``. Note the order of the
    caches: the rotary one comes first. With scales the caches are int8:
    ``round(x * scale)`` to nearest even, saturated (decision: the rounding is unverified).

    Where token (b, s) is written: ``Norm``: position ``index[b, s]`` of row b. ``PA`` (=
    ``PA_BNSD``) and ``PA_NZ``: slot ``index[b * S + s]``, ``block, offset = divmod(slot, bs)``.
    ``PA_BLK_*``: ``index`` holds the first slot of each page of ``bs`` tokens. The NZ modes store
    a block in the order (D / L, bs, L), L = 32 / itemsize of the cache, under the declared shape
    (num_blocks, bs, 1, D). A negative index is skipped (decision; vllm-ascend pads with -1).

    Attributes:
        kv: (B, 1, S, 576) float16 or bfloat16; the host providers also take float32 and other
            sizes of the two parts, as gamma and cos have them.
        gamma: (512,).
        cos: (B, 1, S, 64), halves repeated.
        sin: (B, 1, S, 64).
        index: int64; Norm (B, S), PA (B * S,), PA_BLK (B * ceil(S / bs),).
        k_cache: Norm (B, 1, L, 64), L >= S; paged (num_blocks, bs, 1, 64); dtype of kv or int8.
        ckv_cache: The same with 512.
        k_rope_scale: (64,) float32, together with c_kv_scale.
        c_kv_scale: (512,) float32.
        k_rope_offset: Not supported.
        c_kv_offset: Not supported.
        v: (B, 1, S, Dv) of a newer variant in which k takes all of kv; what is normalised then is
            (unverified), so that the host providers leave it out.
        epsilon: Added to the mean square.
        cache_mode: ``Norm``, ``PA``, ``PA_BNSD``, ``PA_NZ``, ``PA_BLK_BNSD`` or ``PA_BLK_NZ``.
        is_output_kv: Also return what was written, unquantised; honoured in the paged modes only.

    Returns k_cache and ckv_cache (updated in place and returned; the torch operator returns copies,
    because torch does not let a custom operator return an input), k_embed_out (B, 1, S, 64) and
    y_out (B, 1, S, 512) in the dtype of kv; the last two are zeros unless asked for (decision).

    Source: op-plugin docs npu_kv_rmsnorm_rope_cache; torch_npu 2.13 meta kernel.
    """

    kv: torch.Tensor
    gamma: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    index: torch.Tensor
    k_cache: torch.Tensor = mutated()
    ckv_cache: torch.Tensor = mutated()
    k_rope_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    c_kv_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    k_rope_offset: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    c_kv_offset: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    v: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    epsilon: float = attrs.field(default=1e-5, kw_only=True)
    cache_mode: str = attrs.field(default="Norm", kw_only=True)
    is_output_kv: bool = attrs.field(default=False, kw_only=True)

    @property
    def is_paged(self) -> bool:
        """Whether the caches are paged."""
        return self.cache_mode != "Norm"

    @property
    def is_nz(self) -> bool:
        """Whether a cache block is stored in FRACTAL_NZ order."""
        return self.cache_mode.endswith("NZ")

    @property
    def by_page(self) -> bool:
        """Whether ``index`` has one entry per page instead of one per token."""
        return self.cache_mode.startswith("PA_BLK")

    @property
    def block_size(self) -> int:
        """Tokens per cache block, or per row in the mode Norm."""
        return self.k_cache.shape[1 if self.is_paged else 2]

    @property
    def rope_size(self) -> int:
        """Elements of the rotated part."""
        return self.cos.shape[3]

    @property
    def latent_size(self) -> int:
        """Elements of the normalised part."""
        return self.gamma.shape[0]

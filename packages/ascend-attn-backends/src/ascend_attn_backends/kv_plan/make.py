"""Plans a model's caches, and refuses what no cache can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ascend_attn_ops import Refusal
from ascend_hwprofile import HardwareProfile

from ..dsa import AscendDSABackend, AscendDSAIndexerBackend, DsaCompression
from ..errors import AttentionBackendError
from ..latent_layout import KERNEL_BLOCK_MAX, KERNEL_BLOCK_MULTIPLE
from ..request import BackendRequest
from .groups import COMPRESSED, INDEX, INDEX_STATE, STATE, WINDOW, DsaCacheGroup
from .plan import DsaAttnKvPlan, DsaKvPlanOptions, DsaModelShape

_INDEXER = "op-plugin docs npu_lightning_indexer: blocks of 16 .. 1024 keys, a multiple of 16"
_COMPRESSOR = "ops-transformer docs compressor: blocks of 16 .. 1024 tokens, a multiple of 16"


class DsaKvPlanError(AttentionBackendError, ValueError):
    """A model's caches cannot be cut like this.

    Attributes:
        refusals: Every broken rule.
    """

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        self.refusals = tuple(refusals)
        reasons = "\n".join(f"  - {refusal}" for refusal in self.refusals)
        super().__init__(f"no plan for the caches:\n{reasons}")


def get_dsa_attn_kv_plan(
    model: DsaModelShape,
    options: DsaKvPlanOptions | None = None,
    profile: HardwareProfile | None = None,
) -> DsaAttnKvPlan:
    """Which caches each layer keeps, their blocks and their bytes.

    Args:
        model: Layers and sizes.
        options: Blocks and steps; None for the defaults.
        profile: Product whose operators must take the caches; None to ask none.

    Raises:
        DsaKvPlanError: A rule is broken; the error has them all.
    """
    options = DsaKvPlanOptions() if options is None else options
    refusals = list(_refusals(model, options))
    if profile is not None and not refusals:
        refusals = _product_refusals(model, options, profile)
    if refusals:
        raise DsaKvPlanError(refusals)
    return DsaAttnKvPlan(model=model, options=options, groups=tuple(_groups(model, options)))


def _groups(model: DsaModelShape, options: DsaKvPlanOptions) -> Iterator[DsaCacheGroup]:
    def group(
        cache: str,
        compression: DsaCompression | None,
        rows: int,
        size: int,
        dtype: torch.dtype = model.dtype,
    ) -> DsaCacheGroup:
        numbered = enumerate(model.layers)
        layers = (n for n, found in numbered if compression is None or found == compression)
        return DsaCacheGroup(
            cache=cache,
            layers=tuple(layers),
            compression=compression,
            rows_per_block=rows,
            row_size=size,
            dtype=dtype,
            window=model.window,
            num_spec_tokens=options.num_spec_tokens,
        )

    yield group(WINDOW, None, options.block_size, model.key_size)
    for compression in _compressions(model):
        rows, tokens = rows_per_block(compression, options), options.state_block_size
        width = 2 * compression.coff
        yield group(COMPRESSED, compression, rows, model.key_size)
        if compression.overlap:
            yield group(INDEX, compression, rows, model.index_size)
        yield group(STATE, compression, tokens, width * model.key_size, torch.float32)
        if compression.overlap:
            yield group(INDEX_STATE, compression, tokens, width * model.index_size, torch.float32)


def _compressions(model: DsaModelShape) -> list[DsaCompression]:
    return list(dict.fromkeys(found for found in model.layers if found is not None))


def rows_per_block(compression: DsaCompression, options: DsaKvPlanOptions) -> int:
    """Compressed keys per block."""
    return max(options.block_tokens // compression.ratio, KERNEL_BLOCK_MULTIPLE)


def _refusals(model: DsaModelShape, options: DsaKvPlanOptions) -> Iterator[Refusal]:
    if not model.layers:
        yield _refusal("layers", 0, "at least one layer", "get_dsa_attn_kv_plan")
    if not model.dtype.is_floating_point or model.dtype.itemsize < 2:
        allowed = "bfloat16 or float16; float32 where the product is simulated"
        found = str(model.dtype).removeprefix("torch.")
        yield _refusal("dtype", found, allowed, "ops-transformer docs sparse_flash_mla")
    if options.block_size < 1 or options.block_size % KERNEL_BLOCK_MULTIPLE:
        allowed = f"a multiple of {KERNEL_BLOCK_MULTIPLE}"
        yield _refusal(
            "block_size", options.block_size, allowed, "docs sparse_flash_mla, A2 and A3"
        )
    size = options.state_block_size
    if size not in range(KERNEL_BLOCK_MULTIPLE, KERNEL_BLOCK_MAX + 1, KERNEL_BLOCK_MULTIPLE):
        allowed = f"a multiple of {KERNEL_BLOCK_MULTIPLE} up to {KERNEL_BLOCK_MAX}"
        yield _refusal("state_block_size", size, allowed, _COMPRESSOR)
    if options.num_spec_tokens < 0:
        yield _refusal("num_spec_tokens", options.num_spec_tokens, "at least 0", "drafts k")
    elif options.max_step_tokens <= options.num_spec_tokens:
        allowed = f"more than the {options.num_spec_tokens} drafts"
        yield _refusal(
            "max_step_tokens", options.max_step_tokens, allowed, "verification of drafts"
        )
    for compression in _compressions(model):
        yield from _block_refusals(compression, options)
    yield from _table_refusals(model)


def _block_refusals(compression: DsaCompression, options: DsaKvPlanOptions) -> Iterator[Refusal]:
    rows, tokens = rows_per_block(compression, options), options.block_tokens
    whole = tokens % compression.ratio == 0 or rows > tokens // compression.ratio
    if tokens < 1 or not whole or rows % KERNEL_BLOCK_MULTIPLE or rows > KERNEL_BLOCK_MAX:
        step = KERNEL_BLOCK_MULTIPLE * compression.ratio
        allowed = (
            f"a multiple of {step} up to {KERNEL_BLOCK_MAX * compression.ratio}, or 1 to {step}: "
            f"{KERNEL_BLOCK_MULTIPLE} to {KERNEL_BLOCK_MAX} keys of {compression.ratio} tokens"
        )
        yield _refusal("block_tokens", tokens, allowed, _INDEXER)


def _table_refusals(model: DsaModelShape) -> Iterator[Refusal]:
    """Layers of one ratio share their tables, so they must keep the same."""
    by_ratio: dict[int, set[int | None]] = {}
    for compression in _compressions(model):
        by_ratio.setdefault(compression.ratio, set()).add(compression.top_k)
    for ratio, choices in by_ratio.items():
        if len(choices) > 1:
            found = f"layers compressed by {ratio} with top_k {sorted(map(str, choices))}"
            yield _refusal("top_k", found, "one top_k for one ratio", "DeepseekV4Config.index_topk")


def _product_refusals(
    model: DsaModelShape, options: DsaKvPlanOptions, profile: HardwareProfile
) -> list[Refusal]:
    """What the product's operators say to the caches of each kind of layer."""
    found: list[Refusal] = []
    for compression in dict.fromkeys(model.layers):
        sizes = [options.block_size, options.state_block_size]
        if compression is not None:
            sizes.append(rows_per_block(compression, options))
        for size in dict.fromkeys(sizes):
            request = _request(model, compression, size)
            found += AscendDSABackend.refusals(request, profile)
            if compression is not None and compression.overlap:
                found += AscendDSAIndexerBackend.refusals(
                    _indexer_request(model, compression, size), profile
                )
    return list(dict.fromkeys(found))


def _request(
    model: DsaModelShape, compression: DsaCompression | None, block_size: int
) -> BackendRequest:
    return BackendRequest(
        use_mla=True,
        use_compress=True,
        compress_ratio=1 if compression is None else compression.ratio,
        compressed_top_k=None if compression is None else compression.top_k,
        head_size=model.key_size,
        num_heads=model.num_heads,
        num_kv_heads=1,
        dtype=model.dtype,
        block_size=block_size,
        sliding_window=model.window,
        has_sinks=True,
    )


def _indexer_request(
    model: DsaModelShape, compression: DsaCompression, block_size: int
) -> BackendRequest:
    return BackendRequest(
        use_mla=True,
        use_compress=True,
        compress_ratio=compression.ratio,
        compressed_top_k=compression.top_k,
        head_size=model.index_size,
        num_heads=model.index_heads,
        num_kv_heads=1,
        dtype=model.dtype,
        block_size=block_size,
    )


def _refusal(parameter: str, found: object, allowed: str, source: str) -> Refusal:
    return Refusal(f"kv_plan.{parameter}", parameter, str(found), allowed, source)

"""Builds the compressed backend's metadata, once per step and kind of layer."""

from __future__ import annotations

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..paged_step import PagedStep, PagedStepBuilder
from .compression import KEY_SIZE, WINDOW, DsaCompression
from .metadata import AscendDSAMetadata, CompressedStep
from .steps import DsaTables, compressor_rows, index_rows, repeated_tokens

_COUNT = attrs.validators.ge(1)


@attrs.frozen
class AscendDSAMetadataBuilder(PagedStepBuilder):
    """A pure function from batch and tables to metadata that never reads a device tensor.

    Layers of one kind share a builder: the window alone, or one :class:`DsaCompression`. Prefill,
    chunks, decode and verification need no split.

    Attributes:
        block_size: Tokens per logical block of the window's cache.
        kernel_block_size: Tokens per block that the operator sees; None takes the largest.
        num_heads: Query heads N on this rank; the work split depends on them.
        compression: Of the layers; None for the window alone.
        window: Keys of the sliding window, a token's own included.
        head_size: Elements of a key D; products take 512.
        compressed_block_size: Compressed keys per block; the operators take them as they are.
        state_block_size: Tokens per block of the compressor's states.
        num_spec_tokens: Drafts per request k that a later step may take back; without a right k
            the compressor loses state that is needed after a rejection.
    """

    num_heads: int = attrs.field(validator=_COUNT, kw_only=True)
    compression: DsaCompression | None = attrs.field(default=None, kw_only=True)
    window: int = attrs.field(default=WINDOW, validator=_COUNT, kw_only=True)
    head_size: int = attrs.field(default=KEY_SIZE, validator=_COUNT, kw_only=True)
    compressed_block_size: int = attrs.field(default=128, validator=_COUNT, kw_only=True)
    state_block_size: int = attrs.field(default=128, validator=_COUNT, kw_only=True)
    num_spec_tokens: int = attrs.field(default=0, validator=attrs.validators.ge(0), kw_only=True)

    def build(self, batch: AttentionBatch, tables: DsaTables | None = None) -> AscendDSAMetadata:
        """Metadata of one step; nothing in it aliases the batch or the tables.

        Args:
            batch: The step; its block table and slots are those of the window's cache.
            tables: Blocks of the compressed keys and of the states; None for the window alone.

        Raises:
            AttentionBatchError: See :meth:`PagedStepBuilder.fields`; a table is too narrow; drafts
                are configured and the batch has no host copy of its query starts.
            InvalidFieldError: The batch is not causal, or tables are missing, superfluous or of
                another form.
        """
        batch.validate_in_debug(self.block_size)
        if batch.causal is not True:
            raise InvalidFieldError("causal", batch.causal, "True, the mask of the operator")
        if (tables is None) != (self.compression is None):
            allowed = "None for the window alone" if self.compression is None else "DsaTables"
            raise InvalidFieldError("tables", type(tables).__name__, allowed)
        step = self._step(batch, tables)
        compressed = self._compressed(batch, step, tables)
        starts = torch.cat([torch.zeros_like(step.query_ends[:1]), step.query_ends])
        return AscendDSAMetadata(
            **attrs.asdict(step, recurse=False),
            query_starts=starts,
            window=self.window,
            compressed=compressed,
            plan=self._plan(step, starts, compressed),
        )

    def _step(self, batch: AttentionBatch, tables: DsaTables | None) -> PagedStep:
        """The step over the window; no length is more than what every table can address."""
        step = PagedStep(**self.fields(batch))
        if self.compression is None or tables is None:
            return step
        ratio, size = self.compression.ratio, self.compressed_block_size
        tables.check(batch, ratio, size, self.state_block_size)
        keys = tables.compressed.shape[1] * size
        room = min(keys * ratio + ratio - 1, tables.state.shape[1] * self.state_block_size)
        return attrs.evolve(step, seq_lens=step.seq_lens.clamp(max=room))

    def _compressed(
        self, batch: AttentionBatch, step: PagedStep, tables: DsaTables | None
    ) -> CompressedStep | None:
        compression, size = self.compression, self.compressed_block_size
        if compression is None or tables is None or step.is_empty:
            return None
        ratio = compression.ratio
        table = tables.compressed[: step.num_reqs].clone()
        repeated = repeated_tokens(batch, compression, self.num_spec_tokens)
        return CompressedStep(
            compression=compression,
            block_size=size,
            block_table=table,
            key_lens=torch.div(step.seq_lens, ratio, rounding_mode="floor"),
            residual_lens=step.seq_lens.remainder(ratio),
            compressor=compressor_rows(step, tables, compression, size, repeated),
            index=index_rows(step, ratio, table, size) if compression.overlap else None,
        )

    def _plan(
        self, step: PagedStep, starts: torch.Tensor, compressed: CompressedStep | None
    ) -> torch.Tensor | None:
        if step.is_empty:
            return None
        plan: torch.Tensor = torch.ops.ascend_attn.sparse_flash_mla_metadata(
            self.num_heads,
            1,
            self.head_size,
            cu_seqlens_q=starts,
            seqused_ori_kv=step.seq_lens,
            max_seqlen_q=step.max_query_len,
            max_seqlen_ori_kv=step.max_seq_len,
            layout_q="TND",
            layout_kv="PA_BBND",
            **mask_arguments(self.window, compressed),
            **_compressed_plan(step, compressed),
        )
        return plan


def mask_arguments(window: int, compressed: CompressedStep | None) -> dict[str, object]:
    """Masks of sparse_flash_mla and of its plan, whose defaults differ: both are given all."""
    return {
        "cmp_ratio": 1 if compressed is None else compressed.compression.ratio,
        "ori_mask_mode": 4,
        "cmp_mask_mode": 0 if compressed is None else compressed.mask_mode,
        "ori_win_left": window - 1,
        "ori_win_right": 0,
    }


def length_arguments(compressed: CompressedStep | None) -> dict[str, object]:
    """Lengths of the compressed side, named as both operators name them."""
    if compressed is None:
        return {}
    return {
        "seqused_cmp_kv": compressed.key_lens,
        "cmp_residual_kv": compressed.residual_lens,
    }


def _compressed_plan(step: PagedStep, compressed: CompressedStep | None) -> dict[str, object]:
    if compressed is None:
        return {"has_cmp_kv": False}
    compression = compressed.compression
    return {
        **length_arguments(compressed),
        "max_seqlen_cmp_kv": step.max_seq_len // compression.ratio,
        "cmp_topk": compression.top_k or 0,
        "has_cmp_kv": True,
    }

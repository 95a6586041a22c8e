"""What backends with device lengths compute once per step: lengths, blocks and slots."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ascend_attn_ops import StepCalls, call, scatter_pa_kv_cache

from .batch import AttentionBatch
from .cache_views import CacheViews
from .errors import AttentionBatchError, InvalidFieldError
from .kv_layout import num_blocks_for, scatter_view
from .latent_layout import kernel_block_size_for, kernel_block_table
from .starts import repair_starts


@attrs.frozen(eq=False, kw_only=True)
class PagedStep:
    """One step as the sparse operators take it: all lengths are device tensors.

    It shares no memory with the batch it was built from.

    Attributes:
        num_reqs: Real requests B.
        num_tokens: Real tokens T; output rows after them are set to zero.
        max_query_len: Longest query, or a bound above it.
        max_seq_len: Most keys of a request, or a bound above it.
        causal: Whether keys after a token's own position are hidden.
        block_size: Tokens per logical block; what slots count in.
        kernel_block_size: Tokens per block of ``block_table``.
        query_ends: ``[num_reqs]`` int32 cumulative query lengths, without a leading 0.
        seq_lens: ``[num_reqs]`` int32 keys of each request, this step's tokens included.
        block_table: ``[num_reqs, max_kernel_blocks]`` int32 kernel blocks of each request.
        slot_mapping: ``[num_token_rows]`` int64 cache slots; negative ones are never written.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool
    block_size: int
    kernel_block_size: int
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def sparse_mode(self) -> int:
        """Mask mode of the sparse operators: 3 causal aligned bottom right, 0 all keys."""
        return 3 if self.causal else 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute; the operators refuse empty tensors."""
        return self.num_tokens == 0 or self.num_reqs == 0

    def narrowed(self, first: int, last: int) -> PagedStep:
        """The step with the tokens first up to last only; each sees the keys that it saw before.

        Requests keep their rows. A request that is cut loses the keys of its later tokens, because
        the causal mask is aligned to its last token; a request without tokens keeps none.
        """
        cut = self.query_ends - self.query_ends.clamp(max=last)
        return attrs.evolve(
            self,
            num_tokens=last - first,
            query_ends=self.query_ends.clamp(first, last) - first,
            seq_lens=(self.seq_lens - cut).clamp(min=0) if self.causal else self.seq_lens,
        )


@attrs.frozen
class PagedStepBuilder:
    """A pure function from batch to step that never reads a device tensor.

    Query starts pass through :func:`repair_starts`. Key counts are held between 0 and what the row
    of the block table can address, on the device, so that a stale length never reads the next row.
    Where the batch has host lengths, a row that is too narrow is an error instead.

    Attributes:
        block_size: Tokens per logical block of the cache.
        kernel_block_size: Tokens per block that the operators see; None takes the largest that they
            accept.
    """

    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    kernel_block_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1)), kw_only=True
    )

    def fields(self, batch: AttentionBatch) -> dict[str, Any]:
        """The fields of a :class:`PagedStep` for a batch.

        Raises:
            AttentionBatchError: Causality differs between requests, or the block table has fewer
                columns than a request (by its host length) has blocks.
            InvalidFieldError: The kernel block does not divide the block.
        """
        if not isinstance(batch.causal, bool):
            raise AttentionBatchError("causal", "one value per request", "one value for all")
        self._check_width(batch)
        rows, kernel = batch.num_reqs, self._kernel_block_size()
        starts = repair_starts(batch.query_start_loc[: rows + 1], batch.num_tokens)
        table = kernel_block_table(batch.block_table[:rows], self.block_size // kernel)
        return {
            "num_reqs": rows,
            "num_tokens": batch.num_tokens,
            "max_query_len": batch.max_query_len,
            "max_seq_len": batch.max_seq_len,
            "causal": batch.causal,
            "block_size": self.block_size,
            "kernel_block_size": kernel,
            "query_ends": starts[1:].clone(),
            "seq_lens": batch.seq_lens[:rows].clamp(0, table.shape[1] * kernel),
            "block_table": table,
            "slot_mapping": batch.slot_mapping.clone(),
        }

    def _kernel_block_size(self) -> int:
        if self.kernel_block_size is None:
            return kernel_block_size_for(self.block_size)
        if self.block_size % self.kernel_block_size:
            raise InvalidFieldError(
                "kernel_block_size", self.kernel_block_size, f"a divisor of {self.block_size}"
            )
        return self.kernel_block_size

    def _check_width(self, batch: AttentionBatch) -> None:
        if batch.seq_lens_cpu is None or batch.num_reqs == 0:
            return
        keys = int(batch.seq_lens_cpu[: batch.num_reqs].max())
        needed, width = num_blocks_for(keys, self.block_size), batch.block_table.shape[1]
        if needed > width:
            raise AttentionBatchError(
                "block_table",
                f"{width} columns",
                f"at least {needed}, for {keys} keys in blocks of {self.block_size}",
            )


def write_rows(
    first: tuple[str, torch.Tensor, torch.Tensor],
    second: tuple[str, torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    writing: Writing | None = None,
) -> None:
    """Write two kinds of rows of the same tokens into their caches, in place.

    Args:
        first: Name, rows ``[T, size]`` with T at least the number of slots, and cache
            ``[num_blocks, 1, block_size, size]`` (any strides).
        second: As ``first``; it may be the same.
        slot_mapping: ``[num_token_rows]`` int64; negative slots are skipped.
        writing: What a layer keeps that writes in every step.

    Raises:
        InvalidFieldError: Fewer rows than slots.
        ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
    """
    count = slot_mapping.shape[0]
    for name, rows, _ in (first, second):
        if rows.dim() != 2 or rows.shape[0] < count:
            raise InvalidFieldError(
                name, list(rows.shape), f"[at least {count}, size], one row per slot"
            )
    if count == 0:
        return
    key, value = (
        rows if rows.shape[0] == count else rows[:count] for _, rows, _ in (first, second)
    )
    caches = writing.views(first[2], second[2]) if writing else scatter_views(first[2], second[2])
    tensors = {
        "key": key.unsqueeze(1).contiguous(),
        "value": value.unsqueeze(1).contiguous(),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": slot_mapping,
    }
    if writing:
        writing.calls(scatter_pa_kv_cache, tensors, None, norm_mode)
    else:
        call(scatter_pa_kv_cache, tensors, **norm_mode())


def scatter_views(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two caches as the writer takes them."""
    return scatter_view(first), scatter_view(second)


def norm_mode() -> dict[str, str]:
    """Arguments of the writer for caches that it takes as they are."""
    return {"cache_mode": "Norm"}


@attrs.frozen(eq=False)
class Writing:
    """What a layer keeps that writes into the same caches in every step.

    Attributes:
        calls: Its calls, checked once for each shape.
        views: Its caches as the writer takes them.
    """

    calls: StepCalls = attrs.field(factory=StepCalls, init=False)
    views: CacheViews = attrs.field(factory=lambda: CacheViews(scatter_views), init=False)


def check_shape(name: str, tensor: torch.Tensor, rows: int, *sizes: int | None) -> None:
    """Check a shape: at least ``rows`` rows, then these sizes (None: any).

    Raises:
        InvalidFieldError: Another shape; names the tensor.
    """
    shape = tensor.shape
    if shape[1:] == sizes and shape[0] >= rows:
        return
    fits = tensor.dim() == 1 + len(sizes) and tensor.shape[0] >= rows
    pairs = zip(sizes, tensor.shape[1:], strict=False)
    if not fits or any(want not in (None, found) for want, found in pairs):
        allowed = ", ".join("any" if want is None else str(want) for want in sizes)
        raise InvalidFieldError(name, list(tensor.shape), f"[at least {rows}, {allowed}]")

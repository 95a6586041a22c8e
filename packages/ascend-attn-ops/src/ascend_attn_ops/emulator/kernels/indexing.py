"""Indexing, gathering, scattering and rearranging."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ..abi import NOT_EMULATED, AclnnError
from ..dispatch import kernel

_REDUCE = {0: None, 1: "add", 2: "multiply"}  # reduce of aclnnScatter


def _indices(a: Any) -> list[torch.Tensor | None]:
    """An index of no elements stands for a full slice: torch_npu passes that for ``:``."""
    return [
        None if index.numel() == 0 and index.dim() == 1 and index.dtype != torch.bool else index
        for index in a.indices
    ]


kernel("aclnnIndexSelect")(lambda a: a.self.index_select(a.dim, a.index))
kernel("aclnnIndexFill")(lambda a: a.self.index_fill(a.dim, a.index.long(), a.value))
kernel("aclnnInplaceIndexFill")(lambda a: a.self_ref.index_fill(a.dim, a.index.long(), a.value))
kernel("aclnnIndexFillTensor")(
    lambda a: a.self.index_fill(a.dim, torch.tensor(a.index, dtype=torch.long), a.value)
)
kernel("aclnnInplaceIndexFillTensor")(
    lambda a: a.self_ref.index_fill(a.dim, torch.tensor(a.index, dtype=torch.long), a.value)
)
kernel("aclnnIndexCopy")(lambda a: a.self.index_copy(a.dim, a.index.long(), a.source))
kernel("aclnnInplaceIndexCopy")(lambda a: a.self_ref.index_copy(a.dim, a.index.long(), a.source))
kernel("aclnnIndexAdd", "aclnnIndexAddV2")(
    lambda a: a.self.index_add(a.dim, a.index, a.source, alpha=a.alpha)
)
kernel("aclnnGather")(lambda a: a.self.gather(a.dim, a.index.long()))
kernel("aclnnScatterAdd")(lambda a: a.self.scatter_add(a.dim, a.index.long(), a.src))
kernel("aclnnTake")(lambda a: torch.take(a.self, a.index.long()))
kernel("aclnnCat")(lambda a: torch.cat(a.tensors, a.dim))
kernel("aclnnStack")(lambda a: torch.stack(a.tensors, a.dim))
kernel("aclnnRepeat")(lambda a: a.self.repeat(*a.repeats))
kernel("aclnnRepeatInterleave", "aclnnRepeatInterleaveInt")(
    lambda a: a.self.repeat_interleave(a.repeats)
)
kernel("aclnnRepeatInterleaveWithDim", "aclnnRepeatInterleaveIntWithDim")(
    lambda a: a.self.repeat_interleave(a.repeats, a.dim)
)
kernel("aclnnRepeatInterleaveTensor")(lambda a: torch.repeat_interleave(a.repeats))
kernel("aclnnFlip")(lambda a: a.self.flip(a.dims))
kernel("aclnnRoll")(lambda a: a.x.roll(a.shifts, a.dims))
kernel("aclnnConstantPadNd")(lambda a: functional.pad(a.self, a.pad, value=a.value))
kernel("aclnnEmbedding")(lambda a: functional.embedding(a.indices, a.weight))
kernel("aclnnBincount")(lambda a: torch.bincount(a.self, a.weights, a.minlength))
kernel("aclnnBucketize")(lambda a: torch.bucketize(a.self, a.boundaries, right=a.right))
# Outputs whose shape depends on the data: the caller asks for it after the call.
kernel("aclnnMaskedSelect", resizes=True)(lambda a: a.self.masked_select(a.mask))
kernel("aclnnNonzero", resizes=True)(lambda a: a.self.nonzero())
kernel("aclnnNonzeroV2", resizes=True)(lambda a: a.self.nonzero().T)


@kernel("aclnnIndex")
def index(a: Any) -> torch.Tensor | None:
    """An index without elements is a full slice, unless that leaves nothing to select."""
    return torch.ops.aten.index(a.self, _indices(a)) if a.out.numel() else None


@kernel("aclnnIndexPutImpl")
def index_put(a: Any) -> None:
    """In place, later values win unless they accumulate."""
    torch.ops.aten.index_put_(a.self_ref, _indices(a), a.values, a.accumulate)


@kernel("aclnnScatterNdUpdate")
def scatter_nd_update(a: Any) -> None:
    """``varRef[indices[row]] = updates[row]``, the last dimension of the indices being a place."""
    a.var_ref[tuple(a.indices.long().unbind(-1))] = a.updates


@kernel("aclnnScatter", "aclnnInplaceScatter", "aclnnScatterValue", "aclnnInplaceScatterValue")
def scatter(a: Any) -> torch.Tensor:
    """``reduce``: 0 replaces, 1 adds, 2 multiplies."""
    target: torch.Tensor = a.self if hasattr(a, "self") else a.self_ref
    source = a.src if hasattr(a, "src") else a.value
    mode = _REDUCE[a.reduce]
    if mode is None:
        return target.scatter(a.dim, a.index.long(), source)
    return target.scatter(a.dim, a.index.long(), source, reduce=mode)


@kernel("aclnnOneHot")
def one_hot(a: Any) -> torch.Tensor:
    """``onValue`` at the class, ``offValue`` elsewhere; the classes are the last dimension."""
    hot = functional.one_hot(a.self.long(), a.num_classes).bool()
    return torch.where(hot, a.on_value, a.off_value)


@kernel("aclnnSearchSorted", "aclnnSearchSorteds")
def search_sorted(a: Any) -> torch.Tensor:
    """Positions at which values keep the sequence sorted."""
    values = a.self if isinstance(a.self, torch.Tensor) else torch.tensor(a.self)
    return torch.searchsorted(a.sorted_sequence, values, right=a.right, sorter=a.sorter)


@kernel("aclnnGatherV3")
def gather_slices(a: Any) -> torch.Tensor:
    """Whole slices along ``dim``, one for each entry of ``index``, which may have any rank."""
    if a.batch_dims:
        raise AclnnError(NOT_EMULATED, f"batch_dims {a.batch_dims} is not emulated, only 0")
    shape = (*a.self.shape[: a.dim], *a.index.shape, *a.self.shape[a.dim + 1 :])
    return a.self.index_select(a.dim, a.index.flatten()).view(shape)  # type: ignore[no-any-return]


@kernel("aclnnSplitWithSize")
def split_with_size(a: Any) -> None:
    """Into a list of outputs."""
    for target, part in zip(a.out, a.self.split(a.split_size, a.dim), strict=True):
        target.copy_(part)


@kernel("aclnnStridedSlice")
def strided_slice(a: Any) -> torch.Tensor:
    """``self[begin:end:strides]`` in every dimension."""
    slices = zip(a.begin, a.end, a.strides, strict=True)
    return a.self[tuple(slice(*bounds) for bounds in slices)]  # type: ignore[no-any-return]


@kernel("aclnnUnique", "aclnnUnique2", resizes=True)
def unique(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Values, and where asked for the place of each element and the counts."""
    values, places, counts = torch.unique(a.self, a.sorted, return_inverse=True, return_counts=True)
    inverse = places if a.return_inverse else None
    if not hasattr(a, "return_counts"):
        return values, inverse
    return values, inverse, counts if a.return_counts else None

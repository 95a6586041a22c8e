"""Reductions, scans, sorting and softmax."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import kernel


def _axes(a: Any) -> list[int] | None:
    """Dimensions of the reduction; none given means all."""
    return a.dims or None


def _keep(a: Any) -> bool:
    return bool(a.keep_dims if hasattr(a, "keep_dims") else a.keep_dim)


kernel("aclnnReduceSum")(lambda a: torch.sum(a.self, _axes(a), _keep(a), dtype=a.dtype))
kernel("aclnnReduceNansum")(lambda a: torch.nansum(a.self, _axes(a), _keep(a), dtype=a.dtype))
kernel("aclnnMean")(lambda a: torch.mean(a.self, _axes(a), _keep(a), dtype=a.dtype))
kernel("aclnnProd")(lambda a: torch.prod(a.self, dtype=a.dtype))
kernel("aclnnProdDim")(lambda a: torch.prod(a.self, a.dim, a.keep_dim, dtype=a.dtype))
kernel("aclnnMax")(lambda a: a.self.max())
kernel("aclnnMin")(lambda a: a.self.min())
kernel("aclnnMaxDim")(lambda a: tuple(torch.max(a.self, a.dim, a.keepdim)))
kernel("aclnnMinDim")(lambda a: tuple(torch.min(a.self, a.dim, a.keepdim)))
kernel("aclnnAmax")(lambda a: torch.amax(a.self, a.dims or (), a.keep_dim))
kernel("aclnnAmin")(lambda a: torch.amin(a.self, a.dims or (), a.keep_dim))
kernel("aclnnArgMax")(lambda a: torch.argmax(a.self, a.dim, a.keepdim))
kernel("aclnnArgMin")(lambda a: torch.argmin(a.self, a.dim, a.keepdim))
kernel("aclnnAny")(lambda a: torch.any(a.self, _every(a), a.keep_dim))
kernel("aclnnAll")(lambda a: torch.all(a.self, _every(a), a.keep_dim))
kernel("aclnnVarCorrection")(
    lambda a: torch.var(a.self, _axes(a), correction=a.correction, keepdim=a.keep_dim)
)
kernel("aclnnStd")(
    lambda a: torch.std(a.self, _axes(a), correction=a.correction, keepdim=a.keep_dim)
)
kernel("aclnnLinalgVectorNorm")(
    lambda a: torch.linalg.vector_norm(a.self, a.ord, _axes(a), a.keep_dims, dtype=a.dtype)
)
kernel("aclnnNorm")(lambda a: torch.linalg.vector_norm(a.self, a.p, _axes(a), a.keep_dim))
kernel("aclnnCumsum")(lambda a: torch.cumsum(a.self, a.dim, dtype=a.dtype))
kernel("aclnnCumprod")(lambda a: torch.cumprod(a.self_ref, a.dim, dtype=a.dtype))
kernel("aclnnCummax")(lambda a: tuple(torch.cummax(a.self, a.dim)))
kernel("aclnnCummin")(lambda a: tuple(torch.cummin(a.self, a.dim)))
kernel("aclnnLogSumExp")(lambda a: torch.logsumexp(a.self, a.dims, a.keep_dim))
kernel("aclnnSoftmax")(lambda a: torch.softmax(a.self.double(), a.dim))
kernel("aclnnLogSoftmax")(lambda a: torch.log_softmax(a.self.double(), a.dim))
kernel("aclnnTopk", "aclnnTopkV2")(
    lambda a: tuple(torch.topk(a.self, a.k, a.dim, a.largest, a.sorted))
)
kernel("aclnnSort")(
    lambda a: tuple(torch.sort(a.self, stable=a.stable, dim=a.dim, descending=a.descending))
)


def _every(a: Any) -> list[int]:
    return a.dims or list(range(a.self.dim()))


@kernel("aclnnSoftmaxBackward")
def softmax_backward(a: Any) -> torch.Tensor:
    """``p * (g - sum(g * p))``."""
    weighted: torch.Tensor = a.grad_output.double() * a.output.double()
    return weighted.sub(a.output.double() * weighted.sum(a.dim, keepdim=True))

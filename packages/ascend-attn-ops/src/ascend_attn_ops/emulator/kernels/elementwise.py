"""Copies, fills and elementwise arithmetic: torch's own functions on CPU views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ...aclnn_abi import known_signatures
from ..dispatch import kernel

_SAME_NAME = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "floor", "frac", "log", "log10", "log1p", "log2", "neg",
    "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "signbit", "sin", "sinc", "sinh",
    "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "BitwiseNot": torch.bitwise_not,
    "IsFinite": torch.isfinite,
    "IsNegInf": torch.isneginf,
    "IsPosInf": torch.isposinf,
    "LogicalNot": torch.logical_not,
    "Gelu": functional.gelu,
    "Mish": functional.mish,
    "Silu": functional.silu,
    **{name.capitalize(): getattr(torch, name) for name in _SAME_NAME},
}
# name -> function; each serves the forms that exist: X, Xs, XTensor, XScalar, and in place
_BINARY: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "Mul": torch.mul,
    "Div": torch.true_divide,
    "FloorDivide": torch.floor_divide,
    "Eq": torch.eq,
    "Ne": torch.ne,
    "Gt": torch.gt,
    "Ge": torch.ge,
    "Lt": torch.lt,
    "Less": torch.lt,
    "Le": torch.le,
    "Fmod": torch.fmod,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "LogicalXor": torch.logical_xor,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Atan2": torch.atan2,
    "LogAddExp": torch.logaddexp,
    "LogAddExp2": torch.logaddexp2,
    "LeftShift": torch.bitwise_left_shift,
    "RightShift": torch.bitwise_right_shift,
    "Gcd": torch.gcd,
}
_ROUNDING = {0: None, 1: "trunc", 2: "floor"}  # mode of aclnnDivMod


def _forms(*names: str) -> list[str]:
    return [f"aclnn{name}" for name in names if f"aclnn{name}" in known_signatures()]


def _register_unary(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    kernel(f"aclnn{name}")(lambda a: function(a.self))
    for form in _forms(f"Inplace{name}"):
        kernel(form)(lambda a: function(a.self_ref))


def _register_binary(name: str, function: Callable[[Any, Any], torch.Tensor]) -> None:
    for form in _forms(name, f"{name}s", f"{name}Tensor", f"{name}Scalar"):
        kernel(form)(lambda a: function(a.self, a.other))
    inplace = f"Inplace{name}"
    for form in _forms(inplace, f"{inplace}s", f"{inplace}Tensor", f"{inplace}Scalar"):
        kernel(form)(lambda a: function(a.self_ref, a.other))


for _name, _unary in _UNARY.items():
    _register_unary(_name, _unary)
for _name, _binary in _BINARY.items():
    _register_binary(_name, _binary)


kernel("aclnnInplaceCopy")(lambda a: a.src)
kernel("aclnnCast")(lambda a: a.self)
kernel("aclnnInplaceZero")(lambda a: torch.zeros(()))
kernel("aclnnInplaceOne")(lambda a: torch.ones(()))
kernel("aclnnNpuFormatCast")(lambda a: a.src)
kernel("aclnnArange")(lambda a: torch.arange(a.start, a.end, a.step))
kernel("aclnnRange")(lambda a: a.start + a.step * torch.arange(len(a.out)))  # the end included
kernel("aclnnLinspace")(lambda a: torch.linspace(a.start, a.end, a.steps, dtype=torch.float64))
kernel("aclnnEye")(lambda a: torch.eye(a.n, a.m))
kernel("aclnnTril")(lambda a: a.self.tril(a.diagonal))
kernel("aclnnTriu")(lambda a: a.self.triu(a.diagonal))
kernel("aclnnInplaceTril")(lambda a: a.self_ref.tril(a.diagonal))
kernel("aclnnInplaceTriu")(lambda a: a.self_ref.triu(a.diagonal))
kernel("aclnnGeluV2")(lambda a: functional.gelu(a.x, approximate=("none", "tanh")[a.approximate]))
kernel("aclnnLeakyRelu")(lambda a: functional.leaky_relu(a.self, a.negative_slope))
kernel("aclnnSoftplus")(lambda a: functional.softplus(a.self, a.beta, a.threshold))


@kernel("aclnnInplaceFillScalar", "aclnnInplaceFillTensor")
def fill(a: Any) -> None:
    """One value everywhere."""
    a.self_ref.fill_(a.value)


@kernel("aclnnAdd", "aclnnAdds", "aclnnAddV3")
def add(a: Any) -> torch.Tensor:
    """``self + alpha * other``; the first may be the number."""
    if not isinstance(a.self, torch.Tensor):
        return torch.mul(a.other, a.alpha).add(a.self)
    return torch.add(a.self, a.other, alpha=a.alpha)


kernel("aclnnSub", "aclnnSubs")(lambda a: torch.sub(a.self, a.other, alpha=a.alpha))
kernel("aclnnRsub", "aclnnRsubs")(lambda a: torch.rsub(a.self, a.other, alpha=a.alpha))
kernel("aclnnInplaceAdd", "aclnnInplaceAdds")(
    lambda a: torch.add(a.self_ref, a.other, alpha=a.alpha)
)
kernel("aclnnInplaceSub", "aclnnInplaceSubs")(
    lambda a: torch.sub(a.self_ref, a.other, alpha=a.alpha)
)
kernel("aclnnDivMod", "aclnnDivMods")(
    lambda a: torch.div(a.self, a.other, rounding_mode=_ROUNDING[a.mode])
)
kernel("aclnnInplaceDivMod", "aclnnInplaceDivMods")(
    lambda a: torch.div(a.self_ref, a.other, rounding_mode=_ROUNDING[a.mode])
)
kernel("aclnnPowTensorTensor", "aclnnPowTensorScalar", "aclnnPowScalarTensor")(
    lambda a: torch.pow(a.self, a.exponent)
)
kernel("aclnnInplacePowTensorTensor", "aclnnInplacePowTensorScalar")(
    lambda a: torch.pow(a.self_ref, a.exponent)
)
kernel("aclnnRemainderTensorTensor", "aclnnRemainderTensorScalar", "aclnnRemainderScalarTensor")(
    lambda a: torch.remainder(a.self, a.other)
)
kernel("aclnnInplaceRemainderTensorTensor", "aclnnInplaceRemainderTensorScalar")(
    lambda a: torch.remainder(a.self_ref, a.other)
)
kernel("aclnnClamp", "aclnnClampTensor")(
    lambda a: torch.clamp(a.self, a.clip_value_min, a.clip_value_max)
)
kernel("aclnnClampMin", "aclnnClampMinTensor")(lambda a: torch.clamp(a.self, a.clip_value_min))
kernel("aclnnClampMax", "aclnnClampMaxTensor")(lambda a: torch.clamp(a.self, max=a.clip_value_max))
kernel("aclnnInplaceClampMax", "aclnnInplaceClampMaxTensor")(
    lambda a: torch.clamp(a.self_ref, max=a.clip_value_max)
)
kernel("aclnnInplaceClampMinTensor")(lambda a: torch.clamp(a.self_ref, a.clip_value_min))
kernel("aclnnLerp", "aclnnLerps")(lambda a: torch.lerp(a.self, a.end, a.weight))
kernel("aclnnAddcmul")(lambda a: torch.addcmul(a.self, a.tensor1, a.tensor2, value=a.value))
kernel("aclnnAddcdiv")(lambda a: torch.addcdiv(a.self, a.tensor1, a.tensor2, value=a.value))
kernel("aclnnInplaceAddcmul")(
    lambda a: torch.addcmul(a.self_ref, a.tensor1, a.tensor2, value=a.value)
)
kernel("aclnnInplaceAddcdiv")(
    lambda a: torch.addcdiv(a.self_ref, a.tensor1, a.tensor2, value=a.value)
)
kernel("aclnnInplaceLeakyRelu")(lambda a: functional.leaky_relu(a.self_ref, a.negative_slope))
kernel("aclnnElu")(
    lambda a: torch.ops.aten.elu(a.self, alpha=a.alpha, scale=a.scale, input_scale=a.input_scale)
)
kernel("aclnnSWhere")(lambda a: torch.where(a.condition, a.self, a.other))
kernel("aclnnInplaceMaskedFillScalar", "aclnnInplaceMaskedFillTensor")(
    lambda a: a.self_ref.masked_fill(a.mask, a.value)
)
kernel("aclnnIsClose")(
    lambda a: torch.isclose(a.self, a.other, rtol=a.rtol, atol=a.atol, equal_nan=a.equal_nan)
)
kernel("aclnnEqual")(lambda a: torch.tensor(torch.equal(a.self, a.other)))
kernel("aclnnNanToNum")(lambda a: torch.nan_to_num(a.self, a.nan, a.posinf, a.neginf))

"""Calls of torch that reach the basic operators one by one; run on the CPU and on the NPU.

``test_basic_operators`` compares both sides. Together with the calls written out there they reach
every basic operator that is emulated, which that test counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]
Function = Callable[[Tensors], Any]

_UNARY = (
    "abs", "acos", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "floor", "frac", "log", "log10", "log1p", "log2", "neg",
    "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sinc", "sinh", "sqrt",
    "tan", "tanh", "trunc", "logical_not",
)  # fmt: skip
_COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")
_INTEGERS = ("bitwise_and", "bitwise_or", "bitwise_xor")
_SHIFTS = ("bitwise_left_shift", "bitwise_right_shift")


def inputs(seed: int = 2) -> Tensors:
    """Tensors by name: floats, halves, integers, indices, a mask, and floats inside (0, 1)."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(3, 4, generator=g),
        "y": torch.randn(3, 4, generator=g),
        "h": torch.randn(2, 3, 4, generator=g).half(),
        "w": torch.randn(5, 4, generator=g),
        "i": torch.randint(1, 9, (3, 4), generator=g, dtype=torch.int32),
        "j": torch.randint(1, 9, (3, 4), generator=g, dtype=torch.int32),
        "k": torch.tensor([2, 0, 1]),
        "m": torch.randn(3, 4, generator=g) > 0,
        "n": torch.randn(3, 4, generator=g) > 0,
        "u": torch.rand(3, 4, generator=g) * 0.8 + 0.1,
        "scalar": torch.tensor(2.5 + seed / 4),
        "sorted": torch.randn(5, generator=g).sort().values,
        "t": torch.randn(2, 4, 3, generator=g).half(),
    }


def method(name: str, first: str, *others: Any) -> Function:
    """``first.name(*others)``; an in-place method works on a copy. Texts are names of tensors."""

    def call(a: Tensors) -> Any:
        target = a[first].clone() if name.endswith("_") else a[first]
        return getattr(target, name)(*(a[o] if isinstance(o, str) else o for o in others))

    return call


def each_form() -> Iterator[tuple[str, Function]]:
    """Unary and binary functions in every form: out of place and in place, tensor and number."""
    for name in _UNARY:
        scaled = "x" if name in ("abs", "relu", "neg", "sign", "ceil", "floor", "round") else "u"
        yield name, method(name, scaled)
        if name not in ("abs", "neg", "round", "sign", "trunc"):  # torch_npu composes these
            yield f"{name}_", method(f"{name}_", scaled)
    for name in _COMPARISONS:
        yield name, method(name, "i", "j")
        yield f"{name}_number", method(name, "i", 4)
        yield f"{name}_", method(f"{name}_", "i", "j")
        yield f"{name}_number_", method(f"{name}_", "i", 4)
    for name in _INTEGERS:
        yield name, method(name, "i", "j")
        yield f"{name}_number", method(name, "i", 5)
        yield f"{name}_", method(f"{name}_", "i", "j")
        yield f"{name}_number_", method(f"{name}_", "i", 5)
    for name in _SHIFTS:
        yield name, method(name, "i", "j")
        yield f"{name}_number", method(name, "i", 2)
    for name in ("remainder", "fmod"):
        yield name, method(name, "x", "y")
        yield f"{name}_number", method(name, "x", 0.7)
        yield f"{name}_", method(f"{name}_", "x", "y")
        yield f"{name}_number_", method(f"{name}_", "x", 0.7)
    for name in ("logical_and", "logical_or"):
        yield name, method(name, "m", "n")
        yield f"{name}_", method(f"{name}_", "m", "n")
    for name in ("maximum", "minimum", "atan2", "logaddexp", "logaddexp2", "mul", "sub", "div"):
        yield name, method(name, "x", "y")
    for name in ("mul_", "sub_", "div_"):
        yield name, method(name, "x", "y")
    for rounding in ("trunc", "floor"):
        yield f"div_{rounding}", lambda a, r=rounding: torch.div(a["x"], a["u"], rounding_mode=r)
        yield (
            f"div_{rounding}_",
            (lambda a, r=rounding: a["x"].clone().div_(a["u"], rounding_mode=r)),
        )
        yield (
            f"div_{rounding}_number_",
            (lambda a, r=rounding: a["x"].clone().div_(0.3, rounding_mode=r)),
        )


def range_with_its_end(a: Tensors) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch.range is deprecated
        return torch.range(0, 6, 2, device=a["x"].device) * a["x"][0, 0]


ARITHMETIC: dict[str, Function] = {
    "acosh": lambda a: (a["u"] + 1).acosh(),
    "acosh_": lambda a: (a["u"] + 1).acosh_(),
    "infinities": lambda a: ((a["x"] / 0).isposinf(), (a["x"] / 0).isneginf()),
    "signbit": method("signbit", "x"),
    "mish": lambda a: functional.mish(a["x"]),
    "mish_": lambda a: functional.mish(a["x"].clone(), inplace=True),
    "logical_xor": method("logical_xor", "m", "n"),
    "gcd": method("gcd", "i", "j"),
    "floor_divide": method("floor_divide", "x", "u"),
    "floor_divide_": method("floor_divide_", "x", "u"),
    "floor_divide_number_": method("floor_divide_", "x", 0.3),
    "power": method("pow", "u", "y"),
    "power_": method("pow_", "u", "y"),
    "power_number_": method("pow_", "u", 3),
    "power_of_number": lambda a: 1.5 ** a["x"],
    "remainder_of_number": lambda a: torch.remainder(7, a["i"]),
    "subtract_number": lambda a: torch.sub(a["x"], 1.5, alpha=2),
    "subtract_from": lambda a: torch.rsub(a["x"], a["y"], alpha=2),
    "clamp_max": method("clamp_max", "x", 0.3),
    "clamp_max_": method("clamp_max_", "x", 0.3),
    "clamp_min": method("clamp_min", "x", 0.3),
    "clamp_max_tensor": method("clamp_max", "x", "y"),
    "clamp_min_tensor": method("clamp_min", "x", "y"),
    "clamp_max_tensor_": method("clamp_max_", "x", "y"),
    "clamp_min_tensor_": method("clamp_min_", "x", "y"),
    "lerp": lambda a: (torch.lerp(a["x"], a["y"], 0.3), torch.lerp(a["x"], a["y"], a["u"])),
    "addcmul": lambda a: torch.addcmul(a["x"], a["y"], a["u"], value=2),
    "addcdiv": lambda a: torch.addcdiv(a["x"], a["y"], a["u"], value=2),
    "linspace": lambda a: torch.linspace(0, 2, 7, device=a["x"].device) * a["x"][0, 0],
    "range": range_with_its_end,
    "triangles": lambda a: (a["x"].tril(1), a["x"].clone().tril_(-1), a["x"].clone().triu_(1)),
    "leaky_relu": lambda a: functional.leaky_relu(a["x"], 0.2),
    "softplus": lambda a: functional.softplus(a["x"], 2.0, 1.0),
    "nan_to_num": lambda a: torch.nan_to_num(a["x"] / a["m"], 1.0, 2.0, -3.0),
    "masked_fill_tensor_": method("masked_fill_", "x", "m", "scalar"),
    "fill_tensor_": method("fill_", "x", "scalar"),
}  # fmt: skip

INDEXING: dict[str, Function] = {
    "bincount": lambda a: a["i"].flatten().bincount(minlength=12),
    "index_copy": lambda a: torch.index_copy(a["x"], 0, a["k"], a["y"]),
    "index_fill": lambda a: a["x"].index_fill(0, a["k"][:2], 3.0),
    "index_fill_": lambda a: a["x"].clone().index_fill_(0, a["k"][:2], 3.0),
    "scatter_": lambda a: a["x"].clone().scatter_(1, a["k"][:, None], a["y"]),
    "scatter_number_": lambda a: a["x"].clone().scatter_(1, a["k"][:, None], 9.0),
    "scatter_add": lambda a: a["x"].scatter_add(1, a["k"][:, None], a["y"]),
    "searchsorted_number": lambda a: torch.searchsorted(a["x"].flatten().sort().values, 0.1),
    "take": lambda a: a["x"].take(a["k"]),
    "repeat_each": lambda a: a["x"].repeat_interleave(2),
    "repeat_flat_by_counts": lambda a: a["x"][0, :3].repeat_interleave(a["k"]),
    "repeat_counts": lambda a: torch.repeat_interleave(a["i"][0].long()),
    "unique_inverse": lambda a: torch.unique(a["i"], return_inverse=True),
    "unique_alone": lambda a: torch._unique(a["i"])[0],
    "split_sizes": lambda a: [t + 0 for t in a["x"].split_with_sizes([1, 3], 1)],
}  # fmt: skip

ATTENTION: dict[str, Function] = {
    "attention_plain": lambda a: functional.scaled_dot_product_attention(
        *(a["h"][None] + n for n in range(3)), scale=0.3),
    "attention_masked": lambda a: functional.scaled_dot_product_attention(
        *(a["h"][None] for _ in range(3)), attn_mask=a["m"][:, :3] | torch.eye(
            3, dtype=torch.bool, device=a["m"].device)),
    "attention_grouped": lambda a: functional.scaled_dot_product_attention(
        a["h"][None], a["h"][None, :1], a["h"][None, 1:], is_causal=True, enable_gqa=True),
}  # fmt: skip

LINEAR: dict[str, Function] = {
    "mm": lambda a: torch.mm(a["x"], a["w"].t()),
    "mv": lambda a: torch.mv(a["x"], a["y"][0]),
    "dot": lambda a: torch.dot(a["x"][0], a["y"][0]),
    "addmm": lambda a: torch.addmm(a["y"][:, :3], a["x"], a["x"].t(), beta=0.5, alpha=2),
    "addmm_": lambda a: a["y"][:, :3].clone().addmm_(a["x"], a["x"].t(), beta=0.5, alpha=2),
    "baddbmm": lambda a: torch.baddbmm(
        a["h"][..., :3], a["h"], a["h"].transpose(1, 2), beta=0.5, alpha=2),
}  # fmt: skip

REDUCTIONS: dict[str, Function] = {
    "amax": method("amax", "x", 0),
    "argmin": method("argmin", "x", 1),
    "cummin": method("cummin", "x", 1),
    "cumprod": method("cumprod", "x", 1),
    "vector_norm": lambda a: torch.linalg.vector_norm(a["x"], 3, dim=1),
    "norm": method("norm", "x", 1, 0),
    "extremes": lambda a: (a["x"].max(), a["x"].min(), a["x"].min(1)),
    "products": lambda a: (a["x"].prod(), a["x"].prod(1)),
    "nansum": lambda a: (a["x"] / a["m"] * 0 + a["y"]).nansum(1),
    "spread": lambda a: (a["x"].std(1), a["x"].var(0)),
    "topk_smallest": lambda a: a["x"].topk(2, 1, largest=False),
}  # fmt: skip


def _cast_to_nz(vendor: Any, tensor: torch.Tensor) -> torch.Tensor:
    stored: torch.Tensor = vendor.npu_format_cast(tensor, 29)
    return stored


# Functions of torch_npu, and what they compute, by torch on the CPU.
VENDOR: dict[str, tuple[Callable[[Any, Tensors], Any], Function]] = {
    "gelu_tanh": (
        lambda v, a: v.npu_gelu(a["x"], approximate="tanh"),
        lambda a: functional.gelu(a["x"], approximate="tanh"),
    ),
    "gelu_exact": (
        lambda v, a: v.npu_gelu(a["x"], approximate="none"),
        lambda a: functional.gelu(a["x"]),
    ),
    "rms_norm": (
        lambda v, a: v.npu_rms_norm(a["x"], a["w"][0], 1e-5),
        lambda a: (functional.rms_norm(a["x"], (4,), a["w"][0], 1e-5), one_by_rms(a["x"])),
    ),
    "add_rms_norm": (
        lambda v, a: v.npu_add_rms_norm(a["x"], a["y"], a["w"][0], 1e-5),
        lambda a: (
            functional.rms_norm(a["x"] + a["y"], (4,), a["w"][0], 1e-5),
            one_by_rms(a["x"] + a["y"]), a["x"] + a["y"],
        ),
    ),
    "swiglu": (
        lambda v, a: v.npu_swiglu(a["x"]),
        lambda a: functional.silu(a["x"][:, :2]) * a["x"][:, 2:],
    ),
    "scatter_nd_update": (
        lambda v, a: v.npu_scatter_nd_update(a["x"], a["k"][:, None], a["y"]),
        lambda a: a["x"].index_copy(0, a["k"], a["y"]),
    ),
    "dtype_cast": (
        lambda v, a: v.npu_dtype_cast(a["x"], torch.float16), lambda a: a["x"].half(),
    ),
    "private_matmul": (
        lambda v, a: a["h"][0] @ _cast_to_nz(v, a["h"][1].t().contiguous()),
        lambda a: a["h"][0] @ a["h"][1].t(),
    ),
    "private_addmm": (
        lambda v, a: torch.addmm(
            a["h"][0, :, :3].contiguous(), a["h"][0], _cast_to_nz(v, a["h"][1].t().contiguous())
        ),
        lambda a: torch.addmm(a["h"][0, :, :3], a["h"][0], a["h"][1].t()),
    ),
}  # fmt: skip


class Private(str):
    """Name of an input that is stored in FRACTAL_NZ."""


# Operators that torch_npu calls in other versions of CANN, or on other products, only; called
# directly. Arguments by name (a text names an input), and what they compute.
DIRECT: dict[str, tuple[dict[str, Any], Function]] = {
    "aclnnAddV3": (
        {"self": 1.5, "other": "x", "alpha": 2}, lambda a: 1.5 + 2 * a["x"],
    ),
    "aclnnBatchMatMulWeightNz": (
        {"self": "h", "mat2": Private("t"), "cube_math_type": 0},
        lambda a: torch.bmm(a["h"], a["t"]),
    ),
    "aclnnBucketize": (
        {"self": "x", "boundaries": "sorted", "out_int32": False, "right": True},
        lambda a: torch.bucketize(a["x"], a["sorted"], right=True),
    ),
    "aclnnGatherV3": (
        {"self": "x", "dim": 0, "index": "k", "batch_dims": 0, "mode": 0},
        lambda a: a["x"][a["k"]],
    ),
    "aclnnGelu": ({"self": "x"}, lambda a: functional.gelu(a["x"])),
    "aclnnIndexAddV2": (
        {"self": "x", "dim": 0, "index": "k", "source": "y", "alpha": 2, "mode": 0},
        lambda a: a["x"].index_add(0, a["k"], a["y"], alpha=2),
    ),
    "aclnnIndexFill": (
        {"self": "x", "dim": 1, "index": "k", "value": 2.0},
        lambda a: a["x"].index_fill(1, a["k"], 2.0),
    ),
    "aclnnIndexFillTensor": (
        {"self": "x", "dim": 1, "index": [0, 3], "value": 2.0},
        lambda a: a["x"].index_fill(1, torch.tensor([0, 3]), 2.0),
    ),
    "aclnnInplaceIndexFill": (
        {"self_ref": "x", "dim": 1, "index": "k", "value": 2.0},
        lambda a: a["x"].index_fill(1, a["k"], 2.0),
    ),
    "aclnnInplaceIndexFillTensor": (
        {"self_ref": "x", "dim": 1, "index": [0, 3], "value": 2.0},
        lambda a: a["x"].index_fill(1, torch.tensor([0, 3]), 2.0),
    ),
    "aclnnLessScalar": ({"self": "x", "other": 0.5}, lambda a: a["x"] < 0.5),
    "aclnnNorm": (
        {"self": "x", "p": 3.0, "dims": [1], "keep_dim": True},
        lambda a: a["x"].norm(3, 1, keepdim=True),
    ),
    "aclnnSearchSorted": (
        {"sorted_sequence": "sorted", "self": "x", "out_int32": False, "right": True},
        lambda a: torch.searchsorted(a["sorted"], a["x"], right=True),
    ),
    "aclnnSplitWithSize": (
        {"self": "x", "split_size": [1, 3], "dim": 1}, lambda a: a["x"].split([1, 3], 1),
    ),
    "aclnnStridedSlice": (
        {"self": "x", "begin": [1, 0], "end": [3, 4], "strides": [1, 2]},
        lambda a: a["x"][1:3, 0:4:2],
    ),
    "aclnnTopk": (
        {"self": "x", "k": 2, "dim": 1, "largest": True, "sorted": True},
        lambda a: a["x"].topk(2),
    ),
}  # fmt: skip


def one_by_rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()


def softmax_gradient(a: Tensors) -> torch.Tensor:
    leaf = a["x"].clone().requires_grad_()
    (leaf.softmax(-1) * a["y"]).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


FUNCTIONS: dict[str, Function] = {
    **dict(each_form()), **ARITHMETIC, **INDEXING, **LINEAR, **REDUCTIONS, **ATTENTION,
    "softmax_gradient": softmax_gradient,
}  # fmt: skip

"""Tensor operators that attention code needs beside attention, compared with torch on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from npu_path import basic_functions
from npu_path.basic_functions import Function, Private, Tensors, inputs
from torch.nn import functional

from ascend_attn_ops.aclnn_abi import signature
from ascend_attn_ops.emulator import Emulator
from ascend_attn_ops.emulator.dispatch import load_kernels
from ascend_attn_ops.providers import aclnn

# Calls as they are written, many of several operators; basic_functions has the others.
WRITTEN: dict[str, Function] = {
    "add": lambda a: a["x"] + a["y"],
    "add_number": lambda a: a["x"] + 2,
    "add_scaled": lambda a: torch.add(a["x"], a["y"], alpha=3),
    "subtract": lambda a: a["x"] - a["y"],
    "from_number": lambda a: 1 - a["x"],
    "multiply": lambda a: a["x"] * a["y"],
    "multiply_by_tensor_number": lambda a: a["x"] * a["scalar"],
    "divide": lambda a: a["x"] / a["y"],
    "floor_divide_integers": lambda a: a["i"] // 3,
    "divide_integers": lambda a: torch.div(a["i"], 3, rounding_mode="trunc"),
    "remainder_of_integers": lambda a: a["i"] % 3,
    "square": lambda a: a["x"] ** 2,
    "in_place": lambda a: a["x"].clone().add_(a["y"]).mul_(2).sub_(1).div_(3),
    "fused_in_place": lambda a: a["x"].clone().addcmul_(a["x"], a["y"], value=2).addcdiv_(
        a["y"], a["i"].float()),
    "elu": lambda a: functional.elu(a["x"]) + functional.leaky_relu_(a["y"].clone(), 0.1),
    "compare": lambda a: (a["x"] > a["y"]) & (a["x"] != 0) | (a["y"] <= 0.5),
    "bits": lambda a: (a["i"] & 3) | (a["i"] ^ 5),
    "logical": lambda a: torch.logical_or(a["m"], ~a["m"]),
    "clamp": lambda a: a["x"].clamp(-0.5, 0.5),
    "clamp_min_integer": lambda a: a["i"].clamp(min=3),
    "clamp_by_tensor": lambda a: torch.clamp(a["x"], min=a["y"]),
    "maximum_of_two": lambda a: torch.maximum(a["x"], a["y"]),
    "where": lambda a: torch.where(a["m"], a["x"], a["y"]),
    "where_number": lambda a: torch.where(a["m"], a["x"], 0.0),
    "masked_fill": lambda a: a["x"].masked_fill(a["m"], float("-inf")),
    "exp_log": lambda a: a["x"].exp().log1p().sqrt().rsqrt().reciprocal(),
    "trigonometric": lambda a: a["x"].cos() + a["x"].sin() + a["x"].tanh(),
    "activations": lambda a: functional.silu(a["x"]) + functional.gelu(a["x"]).relu(),
    "finite": lambda a: torch.isfinite(a["x"] / 0),
    "cast": lambda a: a["x"].to(torch.bfloat16).to(torch.float32),
    "cast_to_int": lambda a: a["y"].to(torch.int64),
    "transposed_copy": lambda a: a["x"].t().contiguous(),
    "strided_write": lambda a: torch.zeros_like(a["x"]).t().copy_(a["y"].t()),
    "arange": lambda a: torch.arange(3, 20, 4, device=a["x"].device),
    "full": lambda a: torch.full((2, 3), 7, device=a["x"].device),
    "eye_and_triangle": lambda a: torch.eye(4, device=a["x"].device) + torch.ones_like(
        a["x"][0].expand(4, 4)).triu(1),
    "sum": lambda a: a["x"].sum(),
    "sum_rows": lambda a: a["x"].sum(1, keepdim=True),
    "mean": lambda a: a["x"].mean(0),
    "extremes_of_rows": lambda a: (a["x"].max(1), a["x"].amin(0), a["x"].argmax(1)),
    "any_and_all": lambda a: (a["m"].any(), a["m"].all(1)),
    "cumsum": lambda a: a["i"].cumsum(1),
    "cummax": lambda a: a["i"].cummax(0),
    "softmax": lambda a: a["x"].softmax(-1),
    "log_softmax": lambda a: a["x"].log_softmax(0),
    "logsumexp": lambda a: a["x"].logsumexp(1),
    "topk": lambda a: a["x"].topk(2, 1),
    "sort": lambda a: a["x"].sort(1, descending=True),
    "index_rows": lambda a: a["x"][a["k"]],
    "index_pairs": lambda a: a["x"][a["k"], a["k"]],
    "index_columns": lambda a: a["x"][:, a["k"]],
    "index_mask": lambda a: a["x"][a["m"]],
    "index_nothing": lambda a: a["x"][torch.zeros_like(a["m"])],
    "index_put": lambda a: a["x"].clone().index_put_((a["k"], a["k"]), a["y"][0, :3]),
    "set_rows": lambda a: a["x"].clone().index_copy_(0, a["k"], a["y"]),
    "index_add": lambda a: a["x"].index_add(0, a["k"], a["y"]),
    "index_select": lambda a: a["x"].index_select(1, a["k"]),
    "gather": lambda a: a["x"].gather(1, (a["i"] % 4).long()),
    "scatter": lambda a: a["x"].scatter(1, a["k"][:, None], a["y"]),
    "scatter_number": lambda a: a["x"].scatter(1, a["k"][:, None], 9.0),
    "nonzero": lambda a: a["m"].nonzero(),
    "masked_select": lambda a: a["x"].masked_select(a["m"]),
    "unique": lambda a: torch.unique(a["i"]),
    "bucketize": lambda a: torch.bucketize(a["x"], torch.arange(3.0, device=a["x"].device)),
    "cat": lambda a: torch.cat([a["x"], a["y"]], 1),
    "stack": lambda a: torch.stack([a["x"], a["y"]]),
    "split": lambda a: a["x"].split(3, 1),
    "repeat": lambda a: a["x"].repeat(2, 3),
    "repeat_interleave": lambda a: a["x"].repeat_interleave(2, 0),
    "repeat_by_counts": lambda a: torch.repeat_interleave(a["x"], a["k"], dim=0),
    "flip": lambda a: a["x"].flip(1),
    "roll": lambda a: a["x"].roll(1, 0),
    "pad": lambda a: functional.pad(a["x"], (1, 2), value=3.0),
    "one_hot": lambda a: functional.one_hot(a["k"], 4),
    "embedding": lambda a: functional.embedding(a["k"], a["w"]),
    "matmul": lambda a: a["x"] @ a["w"].t(),
    "batched_matmul": lambda a: torch.bmm(a["h"], a["h"].transpose(1, 2)),
    "broadcast_matmul": lambda a: a["h"] @ a["w"].half().t(),
    "linear": lambda a: functional.linear(a["x"], a["w"], a["w"][:, 0]),
    "einsum": lambda a: torch.einsum("bij,bkj->bik", a["h"], a["h"]),
    "rms_norm": lambda a: functional.rms_norm(a["x"], (4,), a["w"][0], 1e-6),
    "layer_norm": lambda a: functional.layer_norm(a["x"], (4,), a["w"][0], a["w"][1]),
    "attention": lambda a: functional.scaled_dot_product_attention(
        *(a["h"][None] for _ in range(3)), is_causal=True),
    "print": lambda a: a["x"].tolist(),
    "equal": lambda a: (torch.equal(a["x"], a["x"]), torch.allclose(a["x"], a["y"])),
}  # fmt: skip

FUNCTIONS = WRITTEN | basic_functions.FUNCTIONS
assert len(FUNCTIONS) == len(WRITTEN) + len(basic_functions.FUNCTIONS)
VIEWS = ("print", "split")  # no operator is needed
# No input has a part in these, or the answer does not depend on which one it is.
CONSTANT = (
    "logical", "finite", "arange", "full", "eye_and_triangle", "index_nothing", "one_hot", "equal",
    "trunc", "logical_not", "logical_not_", "unique",
)  # fmt: skip
BASIC = ("elementwise", "indexing", "linear", "reductions")


@pytest.fixture
def vendor(npu: Emulator) -> Any:
    import torch_npu

    torch_npu.npu.config.allow_internal_format = True
    return torch_npu


def flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [one for entry in value for one in flat(entry)]
    return [value]


def on_npu(host: Tensors) -> Tensors:
    return {key: tensor.npu() for key, tensor in host.items()}


def different(found: Any, wanted: Any) -> list[str]:
    """What differs between results of the NPU and of the CPU."""
    pairs = zip(flat(found), flat(wanted), strict=True)
    return [text for one, other in pairs if (text := _difference(one, other))]


def _difference(one: Any, other: Any) -> str:
    if not isinstance(other, torch.Tensor):
        return "" if one == pytest.approx(other) else f"{one} is not {other}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype}{list(one.shape)} is not {other.dtype}{list(other.shape)}"
    tolerance = 2e-3 if other.dtype == torch.float16 else 1e-5
    close = torch.allclose(one.cpu(), other, rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if close else f"{one} is not {other}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_cpu(name: str, npu: Emulator) -> None:
    function = FUNCTIONS[name]
    with npu.record() as seen:
        found = function(on_npu(inputs()))
    assert all(t.device.type == "npu" for t in flat(found) if isinstance(t, torch.Tensor))
    assert different(found, function(inputs())) == []
    assert seen.operators or name in VIEWS  # nothing fell back to the CPU unseen
    if name not in CONSTANT:
        assert different(found, function(inputs(5))), "other inputs were not noticed"


@pytest.mark.parametrize("name", basic_functions.VENDOR)
def test_functions_of_torch_npu_equal_torch_on_the_cpu(name: str, vendor: Any) -> None:
    function, wanted = basic_functions.VENDOR[name]
    found = function(vendor, on_npu(inputs()))
    assert different(found, wanted(inputs())) == []
    assert different(found, wanted(inputs(5))), "other inputs were not noticed"


def directly(operator: str, host: Tensors) -> list[torch.Tensor]:
    """What a direct call of an operator writes; its outputs are as large as they have to be."""
    given, function = basic_functions.DIRECT[operator]
    with contextlib.ExitStack() as stack, aclnn.Runtime() as runtime:

        def uploaded(value: torch.Tensor, **options: Any) -> aclnn.DeviceTensor:
            return stack.enter_context(runtime.upload(value, **options))

        arguments = {
            name: uploaded(host[value], fractal_nz=isinstance(value, Private))
            if isinstance(value, str)
            else value
            for name, value in given.items()
        }
        outputs = [p for p in signature(operator).parameters if p.role == "output"]
        made = [uploaded(torch.zeros_like(like)) for like in flat(function(host))]
        if [p.kind for p in outputs] == ["tensors"]:
            arguments[outputs[0].name] = made
        elif outputs:
            arguments |= {p.name: tensor for p, tensor in zip(outputs, made, strict=True)}
        else:
            made = [arguments["self_ref"]]
        runtime.call(operator, arguments)
        return [tensor.torch() for tensor in made]


@pytest.mark.parametrize("operator", basic_functions.DIRECT)
def test_direct_calls_equal_torch_on_the_cpu(operator: str, npu: Emulator) -> None:
    _, function = basic_functions.DIRECT[operator]
    found = directly(operator, inputs())
    assert different(found, function(inputs())) == []
    assert different(found, function(inputs(5))), "other inputs were not noticed"


def test_every_basic_operator_is_compared(npu: Emulator, vendor: Any) -> None:
    with npu.record() as seen:
        for name in FUNCTIONS:
            FUNCTIONS[name](on_npu(inputs()))
        for function, _ in basic_functions.VENDOR.values():
            function(vendor, on_npu(inputs()))
        for operator in basic_functions.DIRECT:
            directly(operator, inputs())
    modules = {name: entry.kernel.__module__ for name, entry in load_kernels().items()}
    basic = {name for name, module in modules.items() if module.rpartition(".")[2] in BASIC}
    assert len(basic) > 250
    assert basic - set(seen.operators) == set()


def test_a_missing_kernel_is_noticed(npu: Emulator) -> None:
    """Control: the results do come from the emulated operators."""
    x = torch.randn(3, 4)
    with npu.without_kernels():
        wrong = x.npu().softmax(-1)
    assert not torch.allclose(wrong.cpu(), x.softmax(-1), equal_nan=False)


def test_random_numbers_follow_the_seed(npu: Emulator) -> None:
    def draw(seed: int) -> list[torch.Tensor]:
        torch.npu.manual_seed(seed)
        made = [torch.rand(50, device="npu"), torch.randn(50, device="npu")]
        made += [torch.randint(0, 9, (50,), device="npu"), torch.randperm(9, device="npu")]
        return [tensor.cpu() for tensor in made]

    first, again, other = draw(1), draw(1), draw(2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    uniform, gaussian, integers, order = first
    assert 0 <= uniform.min() < uniform.max() < 1
    assert gaussian.min() < 0 < gaussian.max()
    assert 0 <= integers.min() <= integers.max() < 9
    assert sorted(order.tolist()) == list(range(9))


def test_other_distributions_are_those_that_were_asked_for(npu: Emulator) -> None:
    torch.npu.manual_seed(5)
    chance = torch.full((4000,), 0.3, device="npu")
    for drawn in (torch.bernoulli(chance), torch.empty(4000, device="npu").bernoulli_(0.3)):
        assert drawn.cpu().unique().tolist() == [0.0, 1.0]
        assert drawn.mean().item() == pytest.approx(0.3, abs=0.05)
    waits = torch.empty(4000, device="npu").exponential_(2.0)
    assert waits.min().item() > 0
    assert waits.mean().item() == pytest.approx(0.5, abs=0.05)
    weights = torch.tensor([0.1, 0.0, 0.2, 0.7], device="npu")
    assert sorted(torch.multinomial(weights, 3).tolist()) == [0, 2, 3]
    often = torch.multinomial(weights, 4000, replacement=True).bincount(minlength=4).cpu() / 4000
    assert often.tolist() == pytest.approx(weights.tolist(), abs=0.05)


def test_dropout_keeps_the_share_that_it_should(npu: Emulator) -> None:
    kept = functional.dropout(torch.ones(20, 100, device="npu"), 0.25).cpu()
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert 0.7 < (kept != 0).float().mean() < 0.8


def test_private_format_and_back(npu: Emulator) -> None:
    import torch_npu

    torch_npu.npu.config.allow_internal_format = True
    matrix = torch.randn(40, 50).half()
    stored = torch_npu.npu_format_cast(matrix.npu(), 29)
    assert torch_npu.get_npu_format(stored) == 29
    assert torch.equal(stored.cpu(), matrix)
    with npu.record() as seen:
        product = torch.randn(2, 40).half().npu() @ stored
    assert seen.operators == ["aclnnMatmulWeightNz"]
    assert str(seen.calls[0].arguments["mat2"]) == "float16[40, 50] FRACTAL_NZ"
    assert product.shape == (2, 50)

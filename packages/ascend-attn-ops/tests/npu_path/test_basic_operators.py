"""Tensor operators that attention code needs beside attention, compared with torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ascend_attn_ops.emulator import Emulator

Function = Callable[[dict[str, torch.Tensor]], Any]


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(3, 4, generator=g),
        "y": torch.randn(3, 4, generator=g),
        "h": torch.randn(2, 3, 4, generator=g).half(),
        "w": torch.randn(5, 4, generator=g),
        "i": torch.randint(1, 9, (3, 4), generator=g, dtype=torch.int32),
        "k": torch.tensor([2, 0, 1]),
        "m": torch.randn(3, 4, generator=g) > 0,
        "scalar": torch.tensor(2.5),
    }


FUNCTIONS: dict[str, Function] = {
    "add": lambda a: a["x"] + a["y"],
    "add_number": lambda a: a["x"] + 2,
    "add_scaled": lambda a: torch.add(a["x"], a["y"], alpha=3),
    "subtract": lambda a: a["x"] - a["y"],
    "from_number": lambda a: 1 - a["x"],
    "multiply": lambda a: a["x"] * a["y"],
    "multiply_by_tensor_number": lambda a: a["x"] * a["scalar"],
    "divide": lambda a: a["x"] / a["y"],
    "floor_divide": lambda a: a["i"] // 3,
    "divide_integers": lambda a: torch.div(a["i"], 3, rounding_mode="trunc"),
    "remainder": lambda a: a["i"] % 3,
    "power": lambda a: a["x"] ** 2,
    "in_place": lambda a: a["x"].clone().add_(a["y"]).mul_(2).sub_(1).div_(3),
    "fused_in_place": lambda a: a["x"].clone().addcmul_(a["x"], a["y"], value=2).addcdiv_(
        a["y"], a["i"].float()),
    "elu": lambda a: functional.elu(a["x"]) + functional.leaky_relu_(a["y"].clone(), 0.1),
    "compare": lambda a: (a["x"] > a["y"]) & (a["x"] != 0) | (a["y"] <= 0.5),
    "bits": lambda a: (a["i"] & 3) | (a["i"] ^ 5),
    "logical": lambda a: torch.logical_or(a["m"], ~a["m"]),
    "clamp": lambda a: a["x"].clamp(-0.5, 0.5),
    "clamp_min": lambda a: a["i"].clamp(min=3),
    "clamp_by_tensor": lambda a: torch.clamp(a["x"], min=a["y"]),
    "maximum": lambda a: torch.maximum(a["x"], a["y"]),
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
    "extremes": lambda a: (a["x"].max(1), a["x"].amin(0), a["x"].argmax(1)),
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

VIEWS = ("print", "split")  # no operator is needed


def flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [one for entry in value for one in flat(entry)]
    return [value]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_cpu(name: str, npu: Emulator) -> None:
    host = inputs()
    wanted = flat(FUNCTIONS[name](host))
    with npu.record() as seen:
        found = flat(FUNCTIONS[name]({key: tensor.npu() for key, tensor in host.items()}))
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == pytest.approx(other)
            continue
        assert (one.device.type, one.shape, one.dtype) == ("npu", other.shape, other.dtype)
        tolerance = 2e-3 if other.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=tolerance)
    assert seen.operators or name in VIEWS  # nothing fell back to the CPU unseen


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

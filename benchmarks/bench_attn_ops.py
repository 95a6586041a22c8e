"""Ratios of ascend-attn-ops against torch, both sides in one run: ``python bench_attn_ops.py``.

* cpu provider of fused_infer_attention_score over a paged cache (gather included) against torch
  SDPA on keys that were gathered before: decode and prefill; wanted at least 0.8 of its speed.
* cpu provider against the reference provider, batch 16 decode; wanted at least 10.
* ``check()`` against ``torch.add`` of two one-element tensors: wanted at most 10 times when the
  verdict is remembered, 200 times when it is not.

Both sides run on one thread unless ``--threads`` says otherwise: decode calls a kernel per block,
and with more threads each call ends in a barrier, which only an idle machine passes quickly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

import ascend_attn_ops as ops
from ascend_attn_ops import selection
from ascend_hwprofile import profile_for

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 128
SCALE = SIZE**-0.5
TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


@attrs.frozen
class Ratio:
    """One measured ratio and what is wanted of it.

    Attributes:
        name: What is compared.
        value: The ratio.
        wanted: Bound, ``>=`` or ``<=`` by ``at_least``.
        at_least: Whether larger is better.
        detail: Both medians in milliseconds.
    """

    name: str
    value: float
    wanted: float
    at_least: bool
    detail: dict[str, float]

    @property
    def met(self) -> bool:
        """Whether the bound holds in this run."""
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted


def medians(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each side, taken in turns after one warm-up of each."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn:
                taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def paged_call(batch: int, rows: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a causal call over a shuffled paged cache."""
    columns = keys // BLOCK
    caches = [torch.randn(batch * columns, KV_HEADS, BLOCK, SIZE).to(dtype) for _ in range(2)]
    return {
        "query": torch.randn(batch * rows, HEADS, SIZE).to(dtype),
        "key": caches[0],
        "value": caches[1],
        "atten_mask": TEMPLATE,
        "actual_seq_lengths": [rows * (i + 1) for i in range(batch)],
        "actual_seq_lengths_kv": [keys] * batch,
        "block_table": torch.randperm(batch * columns).view(batch, columns).int(),
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": BLOCK,
        "scale": SCALE,
    }


def gathered(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values of the call as SDPA takes them."""
    table = call["block_table"].long()
    batch = len(table)
    query = call["query"].view(batch, -1, HEADS, SIZE).transpose(1, 2)
    key, value = (
        call[name][table].transpose(1, 2).reshape(batch, KV_HEADS, -1, SIZE).contiguous()
        for name in ("key", "value")
    )
    return query, key, value


def against_sdpa(name: str, batch: int, rows: int, keys: int, dtype: torch.dtype) -> Ratio:
    """Speed of the cpu provider as a part of SDPA's."""
    call = paged_call(batch, rows, keys, dtype)
    query, key, value = gathered(call)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=rows > 1, scale=SCALE, enable_gqa=True
        )

    def ours() -> torch.Tensor:
        return ops.fused_infer_attention_score(**call, provider="cpu")[0]

    want = sdpa().transpose(1, 2).reshape(ours().shape)
    torch.testing.assert_close(ours().float(), want.float(), rtol=2e-2, atol=2e-2)
    found = medians({"sdpa": sdpa, "cpu": ours}, 5)
    label = f"{name} {str(dtype).removeprefix('torch.')}: SDPA / cpu provider"
    return Ratio(label, found["sdpa"] / found["cpu"], 0.8, True, found)


def against_reference() -> Ratio:
    """Speed-up of the cpu provider over the reference, batch 16 decode."""
    call = paged_call(16, 1, 2048, torch.float32)
    sides = {
        name: lambda name=name: ops.fused_infer_attention_score(**call, provider=name)
        for name in ("reference", "cpu")
    }
    found = medians(sides, 3)
    value = found["reference"] / found["cpu"]
    return Ratio("decode B 16 2k: reference / cpu provider", value, 10.0, True, found)


def check_ratios(name: str) -> list[Ratio]:
    """Time of ``check()`` in additions of one element, remembered and not."""
    op = ops.operator_named(name)
    sample = next(s for s in op.samples() if not s.rules and s.profile == "A3")
    profile = profile_for("A3")
    one = torch.ones(1)

    def fresh() -> Any:
        return ops.from_data(op.record, sample.data)

    kept = fresh()
    records = [fresh() for _ in range(600)]

    def uncached() -> None:
        for record in records[:100]:
            selection._checked.clear()
            ops.check(op, record, profile)
        del records[:100]

    loops = {
        "add": lambda: [torch.add(one, one) for _ in range(1000)],
        "cached": lambda: [ops.check(op, kept, profile) for _ in range(1000)],
    }
    found = medians(loops, 5)
    found["uncached"] = medians({"uncached": uncached}, 5)["uncached"] * 10
    return [
        Ratio(f"check({name}) cached / add", found["cached"] / found["add"], 10.0, False, found),
        Ratio(f"check({name}) not / add", found["uncached"] / found["add"], 200.0, False, found),
    ]


def measure() -> Iterator[Ratio]:
    """All ratios, one after the other."""
    shapes = (
        ("decode B 16 2k", 16, 1, 2048),
        ("decode B 16 8k", 16, 1, 8192),
        ("prefill 1 x 2k", 1, 2048, 2048),
    )
    for name in ("fused_infer_attention_score", "sparse_flash_attention"):
        yield from check_ratios(name)
    for dtype in (torch.float32, torch.bfloat16):
        for name, batch, rows, keys in shapes:
            yield against_sdpa(name, batch, rows, keys, dtype)
    yield against_reference()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{options.threads} torch thread(s) on either side", flush=True)
    ratios = []
    with torch.inference_mode():
        for ratio in measure():
            ratios.append(ratio)
            sign = ">=" if ratio.at_least else "<="
            verdict = "met" if ratio.met else "MISSED"
            bound = f"(wanted {sign} {ratio.wanted:g}: {verdict})"
            print(f"{ratio.value:8.2f}  {ratio.name}  {bound}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([attrs.asdict(ratio) for ratio in ratios], indent=2))


if __name__ == "__main__":
    main()

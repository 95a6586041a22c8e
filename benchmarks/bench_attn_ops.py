"""Ratios of ascend-attn-ops against torch, both sides in one run: ``python bench_attn_ops.py``.

* cpu provider of fused_infer_attention_score over a paged cache (gather included) against torch
  SDPA on keys that were gathered before: decode and prefill; wanted at least 0.8 of its speed.
* cpu provider against the reference provider, batch 16 decode; wanted at least 10.
* ``check()`` against ``torch.add`` of two one-element tensors: wanted at most 10 times when the
  verdict is remembered, 200 times when it is not.
* sparse_flash_attention over 32k against 8k keys with 2,048 selected; wanted at most 1.3.

Both sides run on one thread unless ``--threads`` says otherwise: decode calls a kernel per block,
and with more threads each call ends in a barrier, which only an idle machine passes quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ratios import Ratio, medians, options, report

import ascend_attn_ops as ops
from ascend_attn_ops import selection
from ascend_hwprofile import profile_for

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 128
SCALE = SIZE**-0.5
TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


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
    return Ratio(label, found["sdpa"] / found["cpu"], ">= 0.8", found)


def against_reference(keys: int) -> Ratio:
    """Speed-up of the cpu provider over the reference, batch 16 decode."""
    call = paged_call(16, 1, keys, torch.float32)
    sides = {
        name: lambda name=name: ops.fused_infer_attention_score(**call, provider=name)
        for name in ("reference", "cpu")
    }
    found = medians(sides, 7)
    value = found["reference"] / found["cpu"]
    return Ratio(f"decode B 16, {keys} keys: reference / cpu provider", value, ">= 10", found)


def sparse_decode(keys: int) -> Callable[[], Any]:
    """A sparse_flash_attention decode of 8 requests with 2,048 selected keys each."""
    batch, selected, block = 8, 2048, 128
    columns = keys // block
    latent = torch.randn(batch * columns, block, 1, 512)
    call = {
        "query": torch.randn(batch, 16, 512),
        "key": latent,
        "value": latent,
        "sparse_indices": torch.stack(
            [torch.randperm(keys)[:selected].int() for _ in range(batch)]
        ).view(batch, 1, selected),
        "scale_value": 576**-0.5,
        "block_table": torch.randperm(batch * columns).view(batch, columns).int(),
        "actual_seq_lengths_query": torch.arange(1, batch + 1, dtype=torch.int32),
        "actual_seq_lengths_kv": torch.full((batch,), keys, dtype=torch.int32),
        "query_rope": torch.randn(batch, 16, 64),
        "key_rope": torch.randn(batch * columns, block, 1, 64),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "attention_mode": 2,
    }
    return lambda: ops.sparse_flash_attention(**call, provider="cpu")


def sparse_growth() -> Ratio:
    """Time of sparse attention over 32k keys in times of 8k keys: the selection is the same."""
    found = medians({"32k": sparse_decode(32_768), "8k": sparse_decode(8_192)}, 7)
    label = "sparse_flash_attention, 2,048 selected: 32k keys / 8k keys"
    return Ratio(label, found["32k"] / found["8k"], "<= 1.3", found)


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
        Ratio(f"check({name}) cached / add", found["cached"] / found["add"], "<= 10", found),
        Ratio(f"check({name}) not / add", found["uncached"] / found["add"], "<= 200", found),
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
    yield against_reference(2048)
    yield against_reference(8192)
    yield sparse_growth()


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(0)
    print(f"{parsed.threads} torch thread(s) on either side", flush=True)
    with torch.inference_mode():
        return report(measure(), parsed.json)


if __name__ == "__main__":
    sys.exit(main())

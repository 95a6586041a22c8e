"""A program that calls sparse_flash_attention through aclnn and never imports torch_npu.

Run by test_direct_calls.py; prints one JSON object. Arguments: the SoC, and "later" to import
torch_npu in the end, after all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ascend_attn_ops import emulator

npu = emulator.activate(sys.argv[1], import_torch_npu=False)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from npu_path import direct  # noqa: E402

import ascend_attn_ops as ops  # noqa: E402
from ascend_attn_ops.providers import aclnn  # noqa: E402

inputs = direct.host_inputs()
wanted = direct.expected(inputs)
with aclnn.Runtime() as runtime, npu.record() as seen:
    call = direct.arguments(runtime, inputs)
    runtime.call(direct.OPERATOR, call)
    found = call["attention_out"].torch().double()

given = {name: inputs[name] for name in inputs if name not in ("query", "key", "sparse_indices")}
settings = {"layout_query": "TND", "layout_kv": "PA_BSND", "attention_mode": 2}
provided, _, _ = ops.sparse_flash_attention(
    inputs["query"], inputs["key"], inputs["key"], inputs["sparse_indices"], direct.SCALE,
    **given, **settings, provider="aclnn", profile=npu.profile,
)  # fmt: skip
aclnn.default_runtime().close()
told = {
    "operators": seen.operators,
    "torch_npu": "torch_npu" in sys.modules,
    "error": float((found - wanted).abs().max()),
    "same": bool(torch.equal(provided.double(), found)),
    "live": npu.live,
    "family": runtime.family,
}
if "later" in sys.argv:
    import torch_npu

    cache = torch.zeros(2, 16, 1, 128, dtype=torch.float16, device="npu")
    rows = torch.ones(1, 1, 128, dtype=torch.float16, device="npu")
    slots = torch.tensor([17], dtype=torch.int32, device="npu")
    torch_npu._npu_reshape_and_cache(rows, rows, cache, cache.clone(), slots)
    told["written"] = int(cache.sum().item())
print(json.dumps(told))

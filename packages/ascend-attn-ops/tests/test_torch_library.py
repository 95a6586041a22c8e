from __future__ import annotations

import torch
from test_fused_infer_attention_score import _case, paged

import ascend_attn_ops as ops

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def _fia() -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    arguments, _ = paged(_case())
    positional = tuple(arguments.pop(name) for name in ("query", "key", "value"))
    return positional, arguments


def _scatter() -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    key, value = torch.randn(2, 2, 16), torch.randn(2, 2, 8)
    key_cache, value_cache = torch.zeros(3, 16, 2, 16), torch.zeros(3, 16, 2, 8)
    return (key, value, key_cache, value_cache, torch.tensor([17, 3])), {"cache_mode": "Norm"}


def test_opcheck_fused_infer_attention_score() -> None:
    args, kwargs = _fia()
    torch.library.opcheck(
        torch.ops.ascend_attn.fused_infer_attention_score, args, kwargs, test_utils=CHECKS
    )


def test_opcheck_scatter_pa_kv_cache() -> None:
    args, kwargs = _scatter()
    torch.library.opcheck(
        torch.ops.ascend_attn.scatter_pa_kv_cache, args, kwargs, test_utils=CHECKS
    )


def test_the_torch_operator_and_the_python_operator_agree() -> None:
    args, kwargs = _fia()
    out, lse = torch.ops.ascend_attn.fused_infer_attention_score(*args, **kwargs)
    want, want_lse = ops.fused_infer_attention_score(*args, **kwargs)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_compiles_whole_and_gives_the_same() -> None:
    args, kwargs = _fia()

    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, _ = torch.ops.ascend_attn.fused_infer_attention_score(query * 1, key, value, **kwargs)
        return out * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), twice(*args))


def test_in_place_operator_compiles() -> None:
    args, kwargs = _scatter()
    want = args[2].clone(), args[3].clone()

    def write(key, value, key_cache, value_cache, slots):
        torch.ops.ascend_attn.scatter_pa_kv_cache(
            key, value, key_cache, value_cache, slots, **kwargs
        )
        return key_cache.sum()

    torch.compile(write, fullgraph=True, backend="aot_eager")(*args)
    ops.scatter_pa_kv_cache(args[0], args[1], *want, args[4], **kwargs)
    assert torch.equal(args[2], want[0])
    assert torch.equal(args[3], want[1])
    assert bool(want[0].any())

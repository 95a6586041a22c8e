"""Caches in FRACTAL_NZ: the layout is a property of the tensor, not of its shape."""

from __future__ import annotations

import pytest
import torch
from npu_path.cases import gather, prolog, weights_in_nz
from npu_path.support import on_npu

import ascend_attn_ops as ops
from ascend_attn_ops.emulator import Emulator
from ascend_attn_ops.providers import aclnn


def blocked(cache: torch.Tensor) -> torch.Tensor:
    """(nb, bs, N, D) as (nb, N * D / 16, bs, 16)."""
    blocks, size = cache.shape[:2]
    return cache.reshape(blocks, size, -1, 16).transpose(1, 2).contiguous()


@pytest.fixture
def private(npu: Emulator) -> None:
    import torch_npu

    torch_npu.npu.config.allow_internal_format = True


def test_gather_reads_private_caches_as_such(npu: Emulator, private: None) -> None:
    import torch_npu

    plain = gather(torch.Generator().manual_seed(4))
    wanted = {**plain, "key": plain["key"].clone(), "value": plain["value"].clone()}
    ops.gather_pa_kv_cache(**wanted, provider="reference", profile=npu.profile)
    caches = {name: blocked(plain[name]) for name in ("key_cache", "value_cache")}
    moved = on_npu({**plain, **caches})
    for name in caches:
        moved[name] = torch_npu.npu_format_cast(moved[name], 29)
    with npu.record() as seen:
        ops.gather_pa_kv_cache(**moved, profile=npu.profile)
    (call,) = seen.of("aclnnGatherPaKvCache")
    assert call.arguments["cache_mode"] == "PA_NZ"  # torch_npu takes it from the format
    assert str(call.arguments["key_cache"]) == "bfloat16[6, 32, 16, 16] FRACTAL_NZ"
    for name in ("key", "value"):
        assert torch.equal(moved[name].cpu(), wanted[name])


def test_without_the_format_the_same_shapes_are_read_as_plain(npu: Emulator, private: None) -> None:
    """What a forgotten format cast does: torch_npu says Norm. The sanitizer asks for the format."""
    plain = gather(torch.Generator().manual_seed(4))
    caches = {name: blocked(plain[name]) for name in ("key_cache", "value_cache")}
    moved = on_npu({**plain, **caches})
    call = ops.gather_pa_kv_cache.npu_calls["torch_npu"](ops.gather_pa_kv_cache.bind(**moved))
    with npu.without_kernels(), npu.record() as seen:
        import torch_npu

        torch_npu.npu_gather_pa_kv_cache(*call.args, **call.kwargs)
    assert seen.of("aclnnGatherPaKvCache")[0].arguments["cache_mode"] == "Norm"
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match="key_cache: found format"):
        ops.gather_pa_kv_cache(**moved, profile=npu.profile)


def test_the_sanitizer_asks_for_the_format_of_the_weights(npu: Emulator, private: None) -> None:
    made = prolog(3, 1024)(torch.Generator().manual_seed(4))
    plain = on_npu(made)
    with ops.sanitize():
        with pytest.raises(ops.SanitizerError, match="weight_dq: found format"):
            ops.mla_prolog_v3(**plain, profile=npu.profile)
        ops.mla_prolog_v3(**weights_in_nz(plain), profile=npu.profile)


def test_aclnn_takes_the_format_from_the_tensor_and_makes_it_from_a_host_one(
    npu: Emulator, private: None
) -> None:
    made = prolog(3, 1024)(torch.Generator().manual_seed(4))
    names = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
    options = {"profile": npu.profile, "provider": "aclnn"}
    found = []
    for arguments in (weights_in_nz(on_npu(made)), made):
        with npu.record() as seen:
            found.append(ops.mla_prolog_v3(**arguments, **options)[0].cpu())
        (call,) = seen.of("aclnnMlaPrologV3WeightNz")
        assert all(str(call.arguments[name]).endswith("FRACTAL_NZ") for name in names)
    wanted = ops.mla_prolog_v3(**weights_in_nz(on_npu(made)), profile=npu.profile)[0].cpu()
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)
    plain = on_npu(made)  # control: the same data without the format is described as it is
    with npu.record() as seen, npu.without_kernels():
        ops.mla_prolog_v3(**plain, **options)
    (call,) = seen.of("aclnnMlaPrologV3WeightNz")
    assert str(call.arguments["weight_dq"]) == "bfloat16[1024, 1536]"


def test_a_private_tensor_comes_back_plain(npu: Emulator) -> None:
    plain = torch.arange(17 * 33, dtype=torch.float32).view(17, 33).half()
    with aclnn.Runtime() as runtime, runtime.upload(plain, fractal_nz=True) as stored:
        assert torch.equal(stored.torch(), plain)
        with runtime.empty((17, 33), "float16") as out:
            runtime.call("aclnnNeg", {"self": stored, "out": out})
            assert torch.equal(out.torch(), -plain)

"""Legal and illegal argument sets of compressor."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, retyped, tensor


def packed(size: int = 512, coff: int = 2, ratio: int = 4) -> Data:
    """Two requests of 5 and 3 tokens, H 4096; overlapping groups of 4 unless said otherwise."""
    width, rows = coff * size, min(8, 8 // ratio + 2)
    return {
        "x": tensor(8, 4096),
        "wkv": tensor(width, 4096),
        "wgate": tensor(width, 4096),
        "kv_state": tensor(9, 128, width, dtype="float32"),
        "score_state": tensor(9, 128, width, dtype="float32"),
        "ape": tensor(ratio, width, dtype="float32"),
        "norm_weight": tensor(size),
        "rope_sin": tensor(rows, 64),
        "rope_cos": tensor(rows, 64),
        "kv_block_table": tensor(2, 4, dtype="int32"),
        "score_block_table": tensor(2, 4, dtype="int32"),
        "cu_seqlens": ints(0, 5, 8),
        "start_pos": ints(0, 130),
        "rope_head_dim": 64,
        "cmp_ratio": ratio,
        "coff": coff,
        "rotary_mode": 2,
    }


def batched() -> Data:
    """Two requests of 6 tokens in (B, S, H)."""
    ropes = {name: tensor(2, 2, 64) for name in ("rope_sin", "rope_cos")}
    base = {name: value for name, value in packed().items() if name != "cu_seqlens"}
    return base | ropes | {"x": tensor(2, 6, 4096)}


def samples() -> Iterator[Sample]:
    """Legal calls and, for every rule, a call that breaks it."""
    base = packed()
    for profile in ("A3", "A5"):
        yield Sample(f"overlap_{profile}", base, profile)
        yield Sample(f"indexer_{profile}", packed(128), profile)
        yield Sample(f"wide_{profile}", packed(512, 1, 128), profile)
        yield Sample(f"batched_{profile}", batched(), profile)
    yield Sample("float32_rope", base | retyped(base, "float32", "rope_sin", "rope_cos"), "A3")
    yield Sample("half_on_the_host", base | {"rotary_mode": 1})
    for rule, changes in _broken(base).items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    eight = packed(512, 2, 8)
    yield Sample("ratio_8_on_the_host", eight)
    yield Sample("broken_cmp_ratio", eight, "A3", ("cmp_ratio",))
    yield Sample("broken_combination", packed(512, 1, 4), "A3", ("combination",))
    for rule, changes in _broken_on_product(base).items():
        yield Sample(f"broken_{rule}", base | changes, "A5", (rule,))


def _broken(base: Data) -> dict[str, Data]:
    return {
        "ranks": {"ape": tensor(1024, dtype="float32")},
        "dtype": {"x": tensor(8, 4096, dtype="int8")},
        "cmp_ratio_positive": {"cmp_ratio": 0},
        "coff": {"coff": 3},
        "rotary_mode": {"rotary_mode": 3},
        "enabled_grad": {"enabled_grad": True},
        "cu_seqlens_given": {"cu_seqlens": None},
        "block_tables_given": {"score_block_table": None},
        "rope_fits": {"rope_head_dim": 63},
        "blocks": {"kv_state": tensor(0, 128, 1024, dtype="float32")},
        "requests": {"cu_seqlens": ints()},
        "weight_dtype": retyped(base, "float16", "wkv"),
        "rope_dtype": retyped(base, "float16", "rope_sin"),
        "state_dtype": retyped(base, "bfloat16", "kv_state"),
        "int32": {"start_pos": ints(0, 130, dtype="int64")},
        "shapes": {"wgate": tensor(512, 4096)},
    }


def _broken_on_product(base: Data) -> dict[str, Data]:
    narrow = {"x": tensor(8, 4352), "wkv": tensor(1024, 4352), "wgate": tensor(1024, 4352)}
    ropes = {name: tensor(4, 32) for name in ("rope_sin", "rope_cos")}
    states = {name: tensor(9, 40, 1024, dtype="float32") for name in ("kv_state", "score_state")}
    floats = ("x", "wkv", "wgate", "norm_weight", "rope_sin", "rope_cos")
    return {
        "half": retyped(base, "float32", *floats),
        "rotary_mode_interleaved": {"rotary_mode": 1},
        "hidden_size": narrow,
        "rope_head_dim": ropes | {"rope_head_dim": 32},
        "block_size": states,
        "norm_dtype": retyped(base, "float32", "norm_weight"),
    }

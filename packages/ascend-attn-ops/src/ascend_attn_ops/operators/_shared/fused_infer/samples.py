"""Legal and illegal argument sets of both versions, in the parameter names of v1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from ....operator import Sample
from ..descriptions import Data, retyped, tensor

_QKV = ("query", "key", "value")


def paged_tnd() -> Data:
    """Two requests (3 and 5 query rows, 20 and 40 keys) over a cache of blocks of 16."""
    return {
        "query": tensor(8, 4, 128),
        "key": tensor(6, 2, 16, 128),
        "value": tensor(6, 2, 16, 128),
        "atten_mask": tensor(2048, 2048, dtype="int8"),
        "actual_seq_lengths": [3, 8],
        "actual_seq_lengths_kv": [20, 40],
        "block_table": tensor(2, 3, dtype="int32"),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 16,
        "scale": 0.088,
    }


def dense_bnsd() -> Data:
    """Two requests of 16 query rows and 64 keys with a full mask."""
    return {
        "query": tensor(2, 4, 16, 128),
        "key": tensor(2, 2, 64, 128),
        "value": tensor(2, 2, 64, 128),
        "atten_mask": tensor(2, 16, 64, dtype="bool"),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BNSD",
        "scale": 0.088,
    }


def decode_bsh() -> Data:
    """Two requests of one query row over a flat cache of blocks of 128."""
    return {
        "query": tensor(2, 1, 512),
        "key": tensor(6, 128, 256),
        "value": tensor(6, 128, 256),
        "actual_seq_lengths_kv": [20, 300],
        "block_table": tensor(2, 3, dtype="int32"),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "block_size": 128,
    }


def absorbed_mla() -> Data:
    """Multi-head latent attention, decode of two requests: D 512 and rope 64."""
    return decode_bsh() | {
        "query": tensor(2, 1, 2048),
        "key": tensor(6, 128, 512),
        "value": tensor(6, 128, 512),
        "query_rope": tensor(2, 1, 256),
        "key_rope": tensor(6, 128, 64),
        "num_key_value_heads": 1,
    }


def int8_decode() -> Data:
    """Decode over int8 keys with per-channel scales."""
    int8 = {"key": tensor(6, 128, 256, dtype="int8"), "value": tensor(6, 128, 256, dtype="int8")}
    scales = {"key_antiquant_scale": tensor(2, 128), "value_antiquant_scale": tensor(2, 128)}
    return decode_bsh() | int8 | scales


def listed_bsh() -> Data:
    """Two requests of 3 and 4 keys in a tensor list."""
    return {
        "query": tensor(2, 2, 80),
        "key": [tensor(1, 3, 80), tensor(1, 4, 80)],
        "value": [tensor(1, 3, 80), tensor(1, 4, 80)],
    }


def shared_samples() -> Iterator[Sample]:
    """Legal calls, and for every shared rule a call that breaks it."""
    yield from _legal()
    for base, profile, broken in _broken():
        for rule, changes in broken.items():
            yield Sample(f"broken_{rule}", base | changes, profile, (rule,))


def renamed(sample: Sample, names: Mapping[str, str]) -> Sample:
    """The sample with other parameter names."""
    return attrs.evolve(sample, data={names.get(key, key): v for key, v in sample.data.items()})


def _legal() -> Iterator[Sample]:
    base = paged_tnd()
    yield Sample("paged_tnd", base, "A3")
    flat = {"key": tensor(6, 16, 256), "value": tensor(6, 16, 256)}
    yield Sample("paged_flat_heads", base | flat, "A2")
    yield Sample("window", base | {"sparse_mode": 4, "pre_tokens": 7, "next_tokens": 0}, "A5")
    yield Sample("float32_without_product", base | retyped(base, "float32", *_QKV))
    yield Sample("full_mask", dense_bnsd(), "A2")
    yield Sample("decode", decode_bsh(), "A2")
    yield Sample("absorbed_mla", absorbed_mla(), "A3")
    nz = {name: tensor(6, 1, 32, 128, 16) for name in ("key", "value")}
    yield Sample("mla_nz", absorbed_mla() | nz | {"key_rope": tensor(6, 1, 4, 128, 16)}, "A3")
    yield Sample("int8_decode", int8_decode(), "A2")
    shift = {"pse_shift": tensor(1, 4, 16, 64)}
    outputs = {"out": [tensor(2, 4, 16, 128), tensor(0, dtype="float32")]}
    yield Sample("given_outputs", dense_bnsd() | outputs, "A3")
    yield Sample("shift", dense_bnsd() | shift | {"softmax_lse_flag": True}, "A3")


def _broken() -> Iterator[tuple[Data, str, dict[str, Data]]]:
    yield paged_tnd(), "A3", _packed_mistakes()
    yield dense_bnsd(), "A3", _dense_mistakes()
    yield decode_bsh(), "A3", _cache_mistakes()
    yield absorbed_mla(), "A3", _mla_mistakes()
    yield int8_decode(), "A3", _quant_mistakes()


def _heads_of(query: int, key: int) -> Data:
    cache = tensor(6, key, 16, 128)
    heads = {"num_heads": query, "num_key_value_heads": key}
    return heads | {"query": tensor(8, query, 128), "key": cache, "value": cache}


def _packed_mistakes() -> dict[str, Data]:
    base = paged_tnd()
    many = list(range(1, 4098))
    narrow = tensor(6, 2, 16, 96)
    alone = {"actual_seq_lengths_kv": [20, 60], "block_table": None, "block_size": 0}
    wide = {name: tensor(60, 2, 192) for name in ("key", "value")}
    return {
        "layout": {"input_layout": "XYZ"},
        "query_rank": {"query": tensor(8, 512)},
        "head_count": {"num_heads": 0},
        "heads": {"num_heads": 8},
        "head_limit": _heads_of(260, 65),
        "group_limit": _heads_of(128, 1),
        "kv_head_count": {"num_key_value_heads": 3},
        "dtype": {"query": tensor(8, 4, 128, dtype="int32")},
        "half": retyped(base, "float32", *_QKV),
        "contiguous": {"query": tensor(8, 4, 128, strides=[1024, 128, 1])},
        "sparse_mode": {"sparse_mode": 5},
        "inner_precise": {"inner_precise": 6},
        "packed_inner_precise": {"inner_precise": 1},
        "query_lengths_given": {"actual_seq_lengths": None},
        "kv_lengths_given": {"actual_seq_lengths_kv": None},
        "mask_given": {"atten_mask": None},
        "mask_dtype": {"atten_mask": tensor(2048, 2048, dtype="float16")},
        "template": {"atten_mask": tensor(1024, 1024, dtype="int8")},
        "packed_mask": {"sparse_mode": 0},
        "kv_dtype": {"key": tensor(6, 2, 16, 128, dtype="float16")},
        "query_lengths": {"actual_seq_lengths": [3, 7]},
        "kv_lengths": {"actual_seq_lengths_kv": [20, 400]},
        "block_table": {"block_table": tensor(3, 3, dtype="int32")},
        "block_size": {"block_size": 32},
        "kv_shape": {"value": tensor(5, 2, 16, 128)},
        "head_size": {"query": tensor(8, 4, 96), "key": narrow, "value": narrow},
        "wide_value": alone | wide | {"query": tensor(8, 4, 192)},
        "batch_limit": {
            "query": tensor(4097, 4, 128),
            "actual_seq_lengths": many,
            "actual_seq_lengths_kv": [1] * 4097,
            "block_table": tensor(4097, 3, dtype="int32"),
        },
    }


def _dense_mistakes() -> dict[str, Data]:
    odd = {
        "query": tensor(2, 4, 16, 50),
        "key": tensor(2, 2, 64, 50),
        "value": tensor(2, 2, 64, 50),
    }
    wide = {name: tensor(2, 2, 64, 192) for name in ("key", "value")}
    keys = tensor(2, 2, 262145, 128)
    one_head = listed_bsh() | {"num_heads": 1, "num_key_value_heads": 1, "atten_mask": None}
    return {
        "mask_rank": {"atten_mask": tensor(1, 1, 2, 16, 64, dtype="bool")},
        "full_mask": {"atten_mask": tensor(2, 16, 63, dtype="bool")},
        "kv_rank": {"key": tensor(2, 64, 256)},
        "kv_pairing": {"key": [tensor(1, 2, 64, 128)] * 2},
        "head_alignment": odd,
        "layout_without_rope": {"input_layout": "BNSD_NBSD"},
        "converting_head_size": wide
        | {"input_layout": "BNSD_BSND", "query": tensor(2, 4, 16, 192)},
        "value_size": {"value": tensor(2, 2, 64, 64)},
        "length_limit": {
            "query": tensor(2, 4, 1, 128),
            "key": keys,
            "value": keys,
            "atten_mask": None,
        },
        "pse_dtype": {"pse_shift": tensor(2, 4, 16, 64, dtype="int8")},
        "pse_shape": {"pse_shift": tensor(2, 4, 64)},
        "post_quant": {"quant_scale2": tensor(1, dtype="float16")},
        "post_quant_rows": {
            "query": tensor(2, 4, 65, 128),
            "sparse_mode": 3,
            "atten_mask": tensor(2048, 2048, dtype="bool"),
            "quant_scale2": tensor(1, dtype="float32"),
        },
        "outputs": {"out": [tensor(2, 4, 16, 128, dtype="float16")]},
        "tensor_list": one_head | {"input_layout": "BSH_BNSD"},
        "tensor_list_shapes": one_head | {"input_layout": "BSH", "query": tensor(3, 2, 80)},
    }


def _cache_mistakes() -> dict[str, Data]:
    by_head = tensor(6, 2, 128, 128)
    nz_narrow, nz_odd = tensor(6, 2, 6, 128, 16), tensor(6, 2, 8, 128, 8)
    small, flat = tensor(6, 24, 256), tensor(6, 128, 65536)
    return {
        "cache_form": {"key": by_head, "value": by_head},
        "nz_head_size": {"query": tensor(2, 1, 384), "key": nz_narrow, "value": nz_narrow},
        "nz_inner": {"key": nz_odd, "value": nz_odd},
        "block_size_limits": {
            "key": small,
            "value": small,
            "block_size": 24,
            "actual_seq_lengths_kv": [20, 70],
        },
        "flat_width": {
            "query": tensor(2, 1, 65536),
            "key": flat,
            "value": flat,
            "num_heads": 128,
            "num_key_value_heads": 128,
        },
    }


def _mla_mistakes() -> dict[str, Data]:
    plain = {"key": tensor(6, 128, 256), "value": tensor(6, 128, 256)}
    return {
        "rope_pair": {"key_rope": None},
        "rope_size": {"query_rope": tensor(2, 1, 128), "key_rope": tensor(6, 128, 32)},
        "rope_dtype": {"key_rope": tensor(6, 128, 64, dtype="float16")},
        "rope_shape": {"key_rope": tensor(6, 64, 64)},
        "mla_head_size": plain | {"query": tensor(2, 1, 1024)},
        "mla_layout": {"input_layout": "BSH_BNSD"},
        "mla_heads": {"query": tensor(2, 1, 1536), "num_heads": 3, "query_rope": tensor(2, 1, 192)},
        "mla_mask": {"atten_mask": tensor(2, 1, 384, dtype="bool")},
        "mla_extras": {"pse_shift": tensor(2, 4, 1, 384)},
    }


def _quant_mistakes() -> dict[str, Data]:
    half = {"key": tensor(6, 128, 256), "value": tensor(6, 128, 256)}
    return {
        "kv_scale_pair": {"value_antiquant_scale": None},
        "scale_without_int8": half,
        "int8_without_scale": {"key_antiquant_scale": None, "value_antiquant_scale": None},
        "scale_dtype": {"key_antiquant_scale": tensor(2, 128, dtype="float32")},
    }

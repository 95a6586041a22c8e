"""One or more real calls of every operator that has a torch_npu provider."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fia_calls import Builder
from npu_path.support import Arguments, Case

BF, HALF, INT = torch.bfloat16, torch.float16, torch.int32
Generator = torch.Generator
INFER_BOTH = ("fused_infer_attention_score", "fused_infer_attention_score_v2")


def normal(g: Generator, *shape: int, dtype: torch.dtype = BF) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def ints(*values: int, dtype: torch.dtype = INT) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def changed(**functions: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    """Arguments with some of them replaced by a function of themselves."""
    return lambda a: {**a, **{name: change(a[name]) for name, change in functions.items()}}


def int8(g: Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)


def selected(g: Generator, rows: tuple[int, ...], count: int, keys: int) -> torch.Tensor:
    """Distinct indices below ``keys``, the last few of each row -1."""
    index = torch.stack(
        [torch.randperm(keys, generator=g)[:count] for _ in range(torch.Size(rows).numel())]
    )
    index[:, count - 3 :] = -1
    return index.view(*rows, 1, count).to(INT)


def paged_lengths(layout: str = "layout_kv") -> Arguments:
    """Two requests with 3 and 1 query rows over 40 and 23 keys in blocks of 16."""
    return {
        "layout_query": "TND",
        layout: "PA_BSND",
        "actual_seq_lengths_query": ints(3, 4),
        f"actual_seq_lengths_{layout.removeprefix('layout_')}": ints(40, 23),
        "block_table": torch.tensor([[4, 1, 6], [2, 5, 0]], dtype=INT),
    }


def sparse_attention(g: Generator) -> Arguments:
    key = normal(g, 7, 16, 1, 512)
    return {
        "query": normal(g, 4, 8, 512),
        "key": key,
        "value": key,
        "sparse_indices": selected(g, (4,), 20, 23),
        "scale_value": 0.0417,
        "query_rope": normal(g, 4, 8, 64),
        "key_rope": normal(g, 7, 16, 1, 64),
        "attention_mode": 2,
        **paged_lengths(),
    }


def whole_sparse_attention(g: Generator) -> Arguments:
    key = normal(g, 2, 30, 1, 512, dtype=HALF)
    return {
        "query": normal(g, 2, 3, 4, 512, dtype=HALF),
        "key": key,
        "value": key,
        "sparse_indices": selected(g, (2, 3), 12, 30),
        "scale_value": 0.0417,
        "query_rope": normal(g, 2, 3, 4, 64, dtype=HALF),
        "key_rope": normal(g, 2, 30, 1, 64, dtype=HALF),
        "attention_mode": 2,
        "sparse_mode": 0,
        "return_softmax_lse": True,
    }


def sparse_attention_with_sinks(g: Generator) -> Arguments:
    return {**sparse_attention(g), "sinks": torch.linspace(-1, 2, 8)}


def statistics_of_paged_keys(g: Generator) -> Arguments:
    """Rows behind the last request, too: they see nothing."""
    made = sparse_attention(g)
    rows = {name: torch.cat([made[name], made[name][:2]]) for name in ("query", "query_rope")}
    indices = torch.cat([made["sparse_indices"], made["sparse_indices"][:2]])
    return {**made, **rows, "sparse_indices": indices, "return_softmax_lse": True}


def packed_keys(g: Generator, *lead: int) -> torch.Tensor:
    """int8 rows of 656 bytes: 512 values, 64 rotary values in bfloat16, 4 float32 scales."""
    scales = torch.rand(*lead, 4, generator=g) * 0.02 + 0.005
    parts = [
        int8(g, *lead, 512),
        normal(g, *lead, 64).view(torch.int8),
        scales.view(torch.int8),
    ]
    return torch.cat(parts, -1)


def quantised_sparse_attention(g: Generator) -> Arguments:
    key = packed_keys(g, 7, 16, 1)
    return {
        "query": normal(g, 4, 8, 576),
        "key": key,
        "value": key,
        "sparse_indices": selected(g, (4,), 20, 23),
        "scale_value": 0.0417,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "attention_mode": 2,
        **paged_lengths(),
    }


def indexer(g: Generator) -> Arguments:
    return {
        "query": normal(g, 4, 8, 128),
        "key": normal(g, 7, 16, 1, 128),
        "weights": normal(g, 4, 8),
        "sparse_count": 24,
        **paged_lengths("layout_key"),
    }


def whole_indexer(g: Generator) -> Arguments:
    return {
        "query": normal(g, 2, 3, 16, 128, dtype=HALF),
        "key": normal(g, 2, 30, 1, 128, dtype=HALF),
        "weights": normal(g, 2, 3, 16, dtype=HALF),
        "sparse_count": 8,
        "sparse_mode": 0,
        "return_value": True,
    }


def quantised_indexer(g: Generator) -> Arguments:
    return {
        "query": int8(g, 4, 8, 128),
        "key": int8(g, 7, 16, 1, 128),
        "weights": normal(g, 4, 8, dtype=HALF),
        "query_dequant_scale": torch.rand(4, 8, generator=g).to(HALF) * 0.01,
        "key_dequant_scale": torch.rand(7, 16, 1, generator=g).to(HALF) * 0.01,
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "sparse_count": 24,
        **paged_lengths("layout_key"),
    }


_INFER = {
    "q_lens": [3, 1], "kv_lens": [40, 23], "heads": (4, 2), "size": 128, "value_size": 128,
    "rope": 0, "form": "BnNBsD", "block": 16, "mode": 3, "mask": None, "pre": 0, "next": 0,
    "shift": 0, "sink": False, "padding": 0, "prefix": 0, "list": False, "seed": 5,
    "layout": "TND",
}  # fmt: skip
_DENSE = {"layout": "BNSD", "form": "rows", "q_lens": [5, 5], "kv_lens": [32, 32]}
INFER_CASES: dict[str, dict[str, Any]] = {
    "paged_causal": {},
    "flat_cache_window": {"form": "BnBsH", "mode": 4, "pre": 9},
    "dense_mask_and_shift": _DENSE | {"mode": 0, "mask": "each", "shift": 1, "pre": 2**31 - 1,
                                      "next": 2**31 - 1},
    "decode_bsh": {"layout": "BSH", "form": "BnBsH", "q_lens": [1, 1], "mode": 0},
    "absorbed_latent": {"layout": "BSND", "form": "BnBsH", "q_lens": [1, 1], "mode": 0,
                        "heads": (4, 1), "size": 512, "value_size": 512, "rope": 64},
}  # fmt: skip


def infer(version: int, changes: dict[str, Any]) -> Callable[[Generator], Arguments]:
    def build(_: Generator) -> Arguments:
        data, _requests = Builder({**_INFER, **changes}, BF).call(version)
        lse = "softmax_lse_flag" if version == 1 else "return_softmax_lse"
        return {**data, lse: not changes.get("rope") and not changes.get("sink")}

    return build


def left_padded(g: Generator) -> Arguments:
    """Queries at the end of their rows, one row of padding behind them."""
    return {
        "query": normal(g, 2, 4, 6, 128),
        "key": normal(g, 2, 2, 32, 128),
        "value": normal(g, 2, 2, 32, 128),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.088,
        "input_layout": "BNSD",
        "actual_seq_lengths": [3, 5],
        "actual_seq_lengths_kv": [20, 32],
        "query_padding_size": ints(1, dtype=torch.int64),
    }


def merge(update_type: int) -> Callable[[Generator], Arguments]:
    def build(g: Generator) -> Arguments:
        return {
            "lse": [normal(g, 12, dtype=torch.float32) for _ in range(3)],
            "local_out": [normal(g, 12, 64) for _ in range(3)],
            "update_type": update_type,
        }

    return build


def ring_merge(g: Generator) -> Arguments:
    def lanes(low: float) -> torch.Tensor:
        return (torch.rand(6, 2, 1, generator=g) + low).expand(6, 2, 8).contiguous()

    return {
        "prev_attn_out": normal(g, 6, 2, 16),
        "prev_softmax_max": lanes(-1),
        "prev_softmax_sum": lanes(1),
        "cur_attn_out": normal(g, 6, 2, 16),
        "cur_softmax_max": lanes(-1),
        "cur_softmax_sum": lanes(1),
        "actual_seq_qlen": ints(0, 2, 6, dtype=torch.int64),
        "input_layout": "TND",
    }


def scatter(mode: str) -> Callable[[Generator], Arguments]:
    def build(g: Generator) -> Arguments:
        caches = [(3, 16, 2, d) for d in (32, 64)]
        if mode == "PA_NZ":
            caches = [(3, 2 * d // 16, 16, 16) for d in (32, 64)]
        return {
            "key": normal(g, 5, 2, 32),
            "value": normal(g, 5, 2, 64),
            "key_cache": normal(g, *caches[0]),
            "value_cache": normal(g, *caches[1]),
            "slot_mapping": ints(40, 3, -1, 17, 0),
            "cache_mode": mode,
        }

    return build


def gather(g: Generator) -> Arguments:
    return {
        "key_cache": normal(g, 6, 16, 1, 512),
        "value_cache": normal(g, 6, 16, 1, 64),
        "block_tables": torch.tensor([[4, 1, 3], [2, 5, -1]], dtype=INT),
        "seq_lens": ints(20, 25),
        "key": normal(g, 47, 1, 512),
        "value": normal(g, 47, 1, 64),
        "seq_offset": ints(16, 0),
    }


def reshape(g: Generator) -> Arguments:
    return {
        "key": normal(g, 5, 2, 32),
        "value": normal(g, 5, 2, 32),
        "key_cache": normal(g, 3, 16, 2, 32),
        "value_cache": normal(g, 3, 16, 2, 32),
        "slot_indices": ints(40, 3, 8, 17, 0),
    }


def paged_decode(g: Generator) -> Arguments:
    return {
        "query": normal(g, 2, 4, 128),
        "key_cache": normal(g, 6, 128, 2, 128),
        "value_cache": normal(g, 6, 128, 2, 128),
        "num_kv_heads": 2,
        "num_heads": 4,
        "scale_value": 0.088,
        "block_table": torch.tensor([[4, 1], [2, 5]], dtype=INT),
        "context_lens": ints(140, 23),
        "out": torch.zeros(2, 4, 128, dtype=BF),
    }


def tables(g: Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin with halves repeated."""
    angle = torch.rand(*shape[:-1], shape[-1] // 2, generator=g) * 6
    both = torch.cat([angle, angle], -1)
    return both.cos().to(BF), both.sin().to(BF)


def interleaved(g: Generator) -> Arguments:
    cos, sin = tables(g, 2, 1, 3, 64)
    return {"x": normal(g, 2, 4, 3, 64), "cos": cos, "sin": sin}


def rotary(mode: str) -> Callable[[Generator], Arguments]:
    def build(g: Generator) -> Arguments:
        r1, r2 = tables(g, 1, 2, 1, 128)
        return {"input": normal(g, 2, 2, 5, 128), "r1": r1, "r2": r2, "rotary_mode": mode}

    return build


def latent_write(
    mode: str, *, quantised: bool = False, outputs: bool = False
) -> Callable[[Generator], Arguments]:
    def build(g: Generator) -> Arguments:
        cos, sin = tables(g, 2, 1, 3, 64)
        paged = mode != "Norm"
        lead = (5, 16, 1) if paged else (2, 1, 9)
        caches = [int8(g, *lead, d) if quantised else normal(g, *lead, d) for d in (64, 512)]
        index = ints(40, 3, 17, 0, 70, 71, dtype=torch.int64)
        return {
            "kv": normal(g, 2, 1, 3, 576),
            "gamma": normal(g, 512),
            "cos": cos,
            "sin": sin,
            "index": index if paged else torch.tensor([[4, 0, 8], [1, 2, 3]]),
            "k_cache": caches[0],
            "ckv_cache": caches[1],
            "k_rope_scale": torch.rand(64, generator=g) * 20 if quantised else None,
            "c_kv_scale": torch.rand(512, generator=g) * 20 if quantised else None,
            "cache_mode": mode,
            "is_output_kv": outputs,
        }

    return build


def prolog(version: int, width: int, mode: str = "PA_BSND") -> Callable[[Generator], Arguments]:
    def build(g: Generator) -> Arguments:
        cos, sin = tables(g, 3, 64)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=g) * shape[-2] ** -0.5).to(BF)

        made = {
            "token_x": normal(g, 3, width),
            "weight_dq": weight(width, 1536),
            "weight_uq_qr": weight(1536, 2 * 192),
            "weight_uk": weight(2, 128, 512),
            "weight_dkv_kr": weight(width, 576),
            "rmsnorm_gamma_cq": normal(g, 1536),
            "rmsnorm_gamma_ckv": normal(g, 512),
            "rope_sin": sin,
            "rope_cos": cos,
            "cache_index": ints(40, 3, 17, dtype=torch.int64),
            "kv_cache": normal(g, 4, 16, 1, 512),
            "kr_cache": normal(g, 4, 16, 1, 64),
            "cache_mode": mode,
        }
        return made | ({"query_norm_flag": True, "qc_qr_scale": 0.5} if version == 3 else {})

    return build


def quantised_prolog(version: int, *, everything: bool) -> Callable[[Generator], Arguments]:
    """int8 weights: the second query projection alone, or all, with int8 cache and query, too."""

    def build(g: Generator) -> Arguments:
        width = 7168 if version == 2 else 1024
        made = prolog(version, width)(g)

        def scales(columns: int) -> torch.Tensor:
            return torch.rand(1, columns, generator=g) * 1e-3 + 1e-4

        made |= {
            "weight_uq_qr": int8(g, 1536, 2 * 192),
            "dequant_scale_w_uq_qr": scales(2 * 192),
            "smooth_scales_cq": torch.rand(1, 1536, generator=g) + 0.5,
        }
        if version == 3:
            made["weight_quant_mode"] = 2 if everything else 1
        if everything:
            made |= {
                "token_x": int8(g, 3, width),
                "weight_dq": int8(g, width, 1536),
                "weight_dkv_kr": int8(g, width, 576),
                "dequant_scale_x": torch.rand(3, 1, generator=g) * 0.05,
                "dequant_scale_w_dq": scales(1536),
                "dequant_scale_w_dkv_kr": scales(576),
                "kv_cache": int8(g, 4, 16, 1, 512),
                "quant_scale_ckv": torch.rand(1, generator=g) * 20 + 10,
            }
            made |= {"kv_cache_quant_mode": 1, "query_quant_mode": 1} if version == 3 else {}
        return made

    return build


def double(value: Any) -> Any:
    return [tensor * 2 for tensor in value] if isinstance(value, list) else value * 2


def weights_in_nz(a: Arguments) -> Arguments:
    """The projections as the operator wants them: FRACTAL_NZ."""
    import torch_npu

    names = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
    return {**a, **{name: torch_npu.npu_format_cast(a[name], 29) for name in names}}


def all_cases() -> Iterator[Case]:
    yield from sparse_cases()
    yield from infer_cases()
    yield from cache_cases()
    yield from latent_cases()


def sparse_cases() -> Iterator[Case]:
    scale = changed(scale_value=double)
    op = "sparse_flash_attention"
    yield Case(op, "paged", sparse_attention, scale)
    yield Case(op, "whole_with_statistics", whole_sparse_attention, scale)
    yield Case(op, "paged_with_statistics", statistics_of_paged_keys, scale)
    yield Case(op, "sinks", sparse_attention_with_sinks, changed(sinks=double), ("A5",))
    yield Case("kv_quant_sparse_flash_attention", "paged", quantised_sparse_attention, scale)
    backwards = changed(weights=torch.neg)
    yield Case("lightning_indexer", "paged", indexer, backwards)
    yield Case("lightning_indexer", "whole_with_values", whole_indexer, backwards)
    yield Case("quant_lightning_indexer", "paged", quantised_indexer, backwards)


def infer_cases() -> Iterator[Case]:
    for version, op in enumerate(INFER_BOTH, start=1):
        control = changed(**{"scale" if version == 1 else "softmax_scale": double})
        for name, changes in INFER_CASES.items():
            yield Case(op, name, infer(version, changes), control)
    sink = infer(2, {"sink": True})
    yield Case(INFER_BOTH[1], "sink", sink, changed(learnable_sink=double))
    prefix = infer(1, _DENSE | {"prefix": 5, "mode": 0})
    yield Case(INFER_BOTH[0], "shared_prefix", prefix, changed(scale=double))
    yield Case(INFER_BOTH[0], "left_padding", left_padded, changed(scale=double))
    no_lse = frozenset({"output 1"})
    yield Case("attention_update", "out", merge(0), changed(lse=double), unspecified=no_lse)
    yield Case("attention_update", "out_and_lse", merge(1), changed(lse=double))
    yield Case("ring_attention_update", "packed", ring_merge, changed(cur_softmax_sum=double))


def cache_cases() -> Iterator[Case]:
    move = changed(slot_mapping=lambda slots: slots.roll(1))
    for mode in ("Norm", "PA_NZ"):
        yield Case("scatter_pa_kv_cache", mode, scatter(mode), move)
    yield Case("gather_pa_kv_cache", "offset", gather, changed(block_tables=lambda t: t.flip(0)))
    other = changed(slot_indices=lambda slots: slots.roll(1))
    yield Case("reshape_and_cache", "norm", reshape, other)
    yield Case("paged_attention", "decode", paged_decode, changed(scale_value=double))


def latent_cases() -> Iterator[Case]:
    yield Case("interleave_rope", "each", interleaved, changed(sin=double))
    for mode in ("half", "interleave"):
        yield Case("rotary_position_embedding", mode, rotary(mode), changed(r2=double))
    gamma = changed(gamma=double)
    for op, rows in (("kv_rmsnorm_rope_cache", (2, 3)), ("kv_rmsnorm_rope_cache_v2", (0, 1))):
        written = frozenset(f"output {i}" for i in rows)
        yield Case(op, "paged", latent_write("PA", outputs=True), gamma)
        yield Case(op, "rows", latent_write("Norm"), gamma, unspecified=written)
        yield Case(op, "nz", latent_write("PA_NZ"), gamma, unspecified=written)
        int8_caches = latent_write("PA", quantised=True)
        yield Case(op, "int8", int8_caches, gamma, unspecified=written)
    other = changed(rmsnorm_gamma_ckv=double)
    no_scale = frozenset({"output 4"})
    yield Case(
        "mla_prolog_v2",
        "paged",
        prolog(2, 7168),
        other,
        before=weights_in_nz,
        unspecified=no_scale,
    )
    yield Case("mla_prolog_v3", "paged", prolog(3, 1024), other, before=weights_in_nz)
    scale = changed(dequant_scale_w_uq_qr=double)
    for op, version in (("mla_prolog_v2", 2), ("mla_prolog_v3", 3)):
        for name, everything in (("int8_projection", False), ("int8", True)):
            build = quantised_prolog(version, everything=everything)
            absent = no_scale if version == 2 and not everything else frozenset()
            yield Case(op, name, build, scale, before=weights_in_nz, unspecified=absent)
    yield Case("mla_prolog_v3", "nz_cache", prolog(3, 1024, "PA_NZ"), other, before=weights_in_nz)


CASES = tuple(all_cases())

"""Legal and illegal argument sets of fused_infer_attention_score_v2."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, tensor
from .._shared.fused_infer.samples import absorbed_mla, paged_tnd, renamed, shared_samples
from .rules import CONTRACT


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    for sample in (*shared_samples(), *_own()):
        yield renamed(sample, CONTRACT.data["renames"])


def _own() -> Iterator[Sample]:
    sink = paged_tnd() | {"learnable_sink": tensor(4)}
    yield Sample("sink", sink, "A3")
    yield Sample("sink_on_a5", sink, "A5")
    wide_sink: Data = {"input_layout": "BSND", "query": tensor(8, 1, 4, 128)}
    tables = {"actual_seq_lengths_kv": [20] * 8, "block_table": tensor(8, 3, dtype="int32")}
    flat = {"key": tensor(6, 16, 256), "value": tensor(6, 16, 256)}
    broken: dict[str, Data] = {
        "sink_shape": {"learnable_sink": tensor(3)},
        "sink_dtype": {"learnable_sink": tensor(4, dtype="float16")},
        "sink_layout": wide_sink | tables | flat | {"actual_seq_lengths": None},
        "sink_extras": {"pse_shift": tensor(2, 4, 5, 48)},
        "sink_lse": {"softmax_lse_flag": True},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", sink | changes, "A3", (rule,))
    yield from _trees()
    yield from _int8_queries()


def _trees() -> Iterator[Sample]:
    tree = absorbed_mla() | {"sparse_mode": 9, "atten_mask": tensor(2, 1, 1, dtype="bool")}
    yield Sample("tree", tree, "A3")
    no_rope = {"query_rope": None, "key_rope": None}
    yield Sample("broken_tree_rope", tree | no_rope, "A3", ("tree_rope",))
    rank4 = {"atten_mask": tensor(1, 2, 1, 1, dtype="bool")}
    yield Sample("broken_tree_mask", tree | rank4, "A3", ("tree_mask",))
    short = {"actual_seq_lengths_kv": [0, 300]}
    yield Sample("broken_tree_lengths", tree | short, "A3", ("tree_lengths",))


def _int8_queries() -> Iterator[Sample]:
    scale = tensor(1, dtype="float32")
    int8: Data = absorbed_mla() | {
        "query": tensor(2, 1, 2048, dtype="int8"),
        "key": tensor(6, 1, 16, 128, 32, dtype="int8"),
        "value": tensor(6, 1, 16, 128, 32, dtype="int8"),
        "key_rope": tensor(6, 1, 4, 128, 16),
        "dequant_scale_query": tensor(2, 1, 4, dtype="float32"),
        "key_antiquant_scale": scale,
        "value_antiquant_scale": scale,
        "query_quant_mode": 3,
    }
    yield Sample("int8_query", int8, "A3")
    wrong = {"query_quant_mode": 0}
    yield Sample("broken_int8_query", int8 | wrong, "A3", ("int8_query",))

"""Legal and illegal argument sets of ring_attention_update."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, retyped, tensor

_OUTS = ("prev_attn_out", "cur_attn_out")
_SOFTMAX = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")


def _all(names: tuple[str, ...], *shape: int, dtype: str) -> Data:
    return {name: tensor(*shape, dtype=dtype) for name in names}


def sbh() -> Data:
    """4 positions, 2 requests, 2 heads of 16."""
    outs = _all(_OUTS, 4, 2, 32, dtype="float16")
    return outs | _all(_SOFTMAX, 2, 2, 4, 8, dtype="float32")


def tnd() -> Data:
    """6 tokens of two requests, 2 heads of 16."""
    outs = _all(_OUTS, 6, 2, 16, dtype="bfloat16")
    lengths = tensor(3, dtype="int64", values=[0, 2, 6])
    softmax = _all(_SOFTMAX, 6, 2, 8, dtype="float32")
    return outs | softmax | {"actual_seq_qlen": lengths, "input_layout": "TND"}


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = sbh()
    yield Sample("sbh", base, "A2")
    yield Sample("tnd", tnd(), "A3")
    yield Sample("tnd_named", tnd() | {"input_softmax_layout": "TND"}, "A3")
    broken: dict[str, Data] = {
        "layout": {"input_layout": "BSND"},
        "softmax_layout": {"input_softmax_layout": "BNS"},
        "out_rank": _all(_OUTS, 4, 2, 2, 16, dtype="float16"),
        "out_dtype": retyped(base, "int8", *_OUTS),
        "softmax_dtype": retyped(base, "float16", "cur_softmax_sum"),
        "softmax_rank": _all(_SOFTMAX, 4, 2, 8, dtype="float32"),
        "lanes": _all(_SOFTMAX, 2, 2, 4, 1, dtype="float32"),
        "query_lengths_dtype": tnd() | {"actual_seq_qlen": tensor(2, dtype="int32")},
        "query_lengths_given": tnd() | {"actual_seq_qlen": None},
        "same_out": retyped(base, "bfloat16", "cur_attn_out"),
        "same_softmax": {"cur_softmax_max": tensor(2, 2, 3, 8, dtype="float32")},
        "softmax_rows": _all(_SOFTMAX, 2, 2, 5, 8, dtype="float32"),
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    strided = {"prev_attn_out": tensor(4, 2, 32, dtype="float16", strides=[128, 64, 1])}
    yield Sample("broken_contiguous", base | strided, "A2", ("contiguous",))

"""Legal and illegal argument sets of fused_infer_attention_score."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, tensor
from .._shared.fused_infer.samples import dense_bnsd, shared_samples


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    yield from shared_samples()
    base = dense_bnsd() | _prefix(16) | {"atten_mask": None}
    yield Sample("shared_prefix", base, "A2")
    pad = {"query_padding_size": tensor(1, dtype="int64"), "atten_mask": None}
    yield Sample("left_padding", dense_bnsd() | pad | {"actual_seq_lengths": [3, 4]}, "A2")
    broken: dict[str, Data] = {
        "prefix_pair": {"value_shared_prefix": None},
        "prefix_use": {
            "actual_seq_lengths_kv": [3, 4],
            "key": tensor(4, 2, 16, 128),
            "value": tensor(4, 2, 16, 128),
            "block_table": tensor(2, 4, dtype="int32"),
            "block_size": 16,
        },
        "prefix_shape": {"key_shared_prefix": tensor(1, 3, 16, 128)},
        "prefix_length": {"actual_shared_prefix_len": [17]},
        "padding": {"kv_padding_size": tensor(1, dtype="int64")},
        "int8_query": {"quant_scale1": tensor(1, dtype="float32")},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, "A3", (rule,))


def _prefix(length: int) -> Data:
    prefix = tensor(1, 2, length, 128)
    return {
        "key_shared_prefix": prefix,
        "value_shared_prefix": prefix,
        "actual_shared_prefix_len": [length],
    }

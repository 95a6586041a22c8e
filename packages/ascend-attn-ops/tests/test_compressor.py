"""compressor against a float64 definition that knows whole requests, no states and no chunks."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale

import ascend_attn_ops as ops

INT = torch.int32
HIDDEN = 12
ROPE = 4
VENDOR_PARAMETERS = (
    "x wkv wgate kv_state score_state ape norm_weight rope_sin rope_cos kv_block_table "
    "score_block_table cu_seqlens seqused start_pos rope_head_dim cmp_ratio coff norm_eps "
    "rotary_mode enabled_grad"
)  # ops-transformer docs compressor


@attrs.frozen
class Model:
    """Weights of a compressor and whole requests."""

    size: int
    coff: int
    ratio: int
    lengths: list[int]
    block: int
    seed: int
    batched: bool = False
    mode: int = 2

    def normal(self, kind: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + kind)
        return torch.randn(shape, generator=generator)

    @property
    def width(self) -> int:
        return self.coff * self.size

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            "wkv": self.normal(1, self.width, HIDDEN) / 3,
            "wgate": self.normal(2, self.width, HIDDEN) / 3,
            "ape": self.normal(3, self.ratio, self.width),
            "norm_weight": self.normal(4, self.size),
        }

    def tokens(self) -> list[torch.Tensor]:
        return [self.normal(10 + b, n, HIDDEN) for b, n in enumerate(self.lengths)]

    def angle(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(sin, cos) of a group's key, one per pair, doubled in the order of the mode."""
        angles = group * self.ratio / 10.0 ** torch.arange(ROPE // 2)
        doubled = angles.repeat_interleave(2) if self.mode == 2 else angles.repeat(2)
        return doubled.sin(), doubled.cos()


@st.composite
def models(draw: st.DrawFn) -> Model:
    requests = draw(st.integers(1, 3))
    return Model(
        draw(st.sampled_from([4, 6])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4, 5])),
        [draw(st.integers(0, 21)) for _ in range(requests)],
        draw(st.sampled_from([1, 3, 16])),
        draw(st.integers(0, 2**31)),
        draw(st.booleans()),
        draw(st.sampled_from([1, 2, 2])),
    )


def definition(m: Model, request: int) -> torch.Tensor:
    """(groups, D) keys of a whole request in float64, row by row and channel by channel."""
    weights = {name: value.double() for name, value in m.weights().items()}
    x = m.tokens()[request].double()
    kv, gate = x @ weights["wkv"].T, x @ weights["wgate"].T
    keys = []
    for group in range(len(x) // m.ratio):
        own = range(group * m.ratio, (group + 1) * m.ratio)
        rows = [(t, m.size * (m.coff - 1)) for t in own]
        if m.coff == 2 and group:
            rows += [(t - m.ratio, 0) for t in own]
        key = torch.zeros(m.size, dtype=torch.float64)
        for channel in range(m.size):
            scores = [
                float(gate[t, at + channel] + weights["ape"][t % m.ratio, at + channel])
                for t, at in rows
            ]
            powers = [math.exp(s) for s in scores]
            values = [float(kv[t, at + channel]) for t, at in rows]
            key[channel] = sum(p * v for p, v in zip(powers, values, strict=True)) / sum(powers)
        key = weights["norm_weight"] * key / (key.pow(2).mean() + 1e-6).sqrt()
        keys.append(turned(m, key, group))
    return torch.stack(keys) if keys else torch.zeros(0, m.size, dtype=torch.float64)


def turned(m: Model, key: torch.Tensor, group: int) -> torch.Tensor:
    """The last channels as complex numbers, times e^(i angle)."""
    half = ROPE // 2
    head, tail = key[:-ROPE], key[-ROPE:]
    pairs = tail.view(half, 2) if m.mode == 2 else tail.view(2, half).T
    angles = group * m.ratio / 10.0 ** torch.arange(half, dtype=torch.float64)
    spun = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(half).double(), angles
    )
    parts = torch.view_as_real(spun)
    return torch.cat([head, (parts if m.mode == 2 else parts.T).flatten()])


class States:
    """The two states of a decoding run, as halves of one tensor; block 0 is nobody's."""

    def __init__(self, m: Model) -> None:
        columns = max(-(-max(m.lengths) // m.block), 1)
        count = columns * len(m.lengths)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(m.seed)) + 1
        self.table = order.view(len(m.lengths), columns).to(INT)
        self.cache = torch.full((count + 1, m.block, 2 * m.width), 77.0)
        self.kv, self.score = self.cache.split(m.width, -1)


def call(m: Model, states: States, starts: list[int], stops: list[int]) -> dict[str, Any]:
    """The call that brings tokens starts .. stops of each request."""
    chunks = [x[a:b] for x, a, b in zip(m.tokens(), starts, stops, strict=True)]
    lengths = [len(chunk) for chunk in chunks]
    count = len(chunks)
    arguments: dict[str, Any] = {
        **m.weights(), "kv_state": states.kv, "score_state": states.score,
        "kv_block_table": states.table, "score_block_table": states.table,
        "start_pos": torch.tensor(starts, dtype=INT), "rope_head_dim": ROPE,
        "cmp_ratio": m.ratio, "coff": m.coff, "rotary_mode": m.mode,
    }  # fmt: skip
    new = [range(a // m.ratio, b // m.ratio) for a, b in zip(starts, stops, strict=True)]
    if m.batched:
        room = max(lengths) + 1
        padding = [torch.full((room - n, HIDDEN), 5.0) for n in lengths]
        arguments["x"] = torch.stack(
            [torch.cat(pair) for pair in zip(chunks, padding, strict=True)]
        )
        arguments["seqused"] = torch.tensor(lengths, dtype=INT)
        shape = (count, -(-room // m.ratio), ROPE)
        places = [(b, i) for b, groups in enumerate(new) for i in range(len(groups))]
    else:
        arguments["x"] = torch.cat([*chunks, torch.full((1, HIDDEN), 5.0)])
        arguments["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT)
        total = sum(lengths) + 1
        shape = (min(total, total // m.ratio + count), ROPE)
        places = [(i,) for i in range(sum(map(len, new)))]
    sin, cos = torch.full(shape, 3.0), torch.full(shape, 3.0)
    for place, group in zip(places, itertools.chain(*new), strict=True):
        sin[place], cos[place] = m.angle(group)
    return arguments | {"rope_sin": sin, "rope_cos": cos}


def keys_of(m: Model, out: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """The keys of each request; the rest of the output must be 0."""
    if m.batched:
        assert not any(out[b, n:].any() for b, n in enumerate(counts))
        return [out[b, :n] for b, n in enumerate(counts)]
    assert not out[sum(counts) :].any()
    return list(out[: sum(counts)].split(counts))


def run(m: Model, cuts: list[list[int]], states: States | None = None) -> list[torch.Tensor]:
    """Keys of each request when it comes in pieces; ``cuts`` has the ends of each call."""
    states = states or States(m)
    found: list[list[torch.Tensor]] = [[] for _ in m.lengths]
    starts = [0] * len(m.lengths)
    for stops in [*cuts, m.lengths]:
        out, *training = ops.compressor(**call(m, states, starts, stops))
        assert all(extra.shape == (0,) for extra in training)
        counts = [b // m.ratio - a // m.ratio for a, b in zip(starts, stops, strict=True)]
        for pieces, piece in zip(found, keys_of(m, out, counts), strict=True):
            pieces.append(piece)
        starts = stops
    return [torch.cat(pieces) for pieces in found]


@settings(max_examples=scale(80))
@given(models(), st.lists(st.floats(0, 1), max_size=4))
def test_any_sequence_of_calls_equals_the_definition(m: Model, parts: list[float]) -> None:
    cuts = [[int(part * n) for n in m.lengths] for part in sorted(parts)]
    for request, keys in enumerate(run(m, cuts)):
        torch.testing.assert_close(keys.double(), definition(m, request), rtol=2e-4, atol=2e-4)


def _fixed(**changes: Any) -> Model:
    values: dict[str, Any] = {
        "size": 6, "coff": 2, "ratio": 4, "lengths": [14, 9], "block": 3, "seed": 8,
    }  # fmt: skip
    return Model(**(values | changes))


@pytest.mark.parametrize("coff", [1, 2])
def test_token_by_token_equals_all_at_once(coff: int) -> None:
    m = _fixed(coff=coff, lengths=[14, 14])
    steps = run(m, [[n, n] for n in range(1, 14)])
    for one, other in zip(steps, run(m, []), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert one.any()


@pytest.mark.parametrize("wrong", [{"coff": 1}, {"ratio": 2}, {"mode": 1}, {"seed": 9}], ids=str)
def test_a_wrong_definition_is_noticed(wrong: dict[str, Any]) -> None:
    m = _fixed()
    keys, want = run(m, [])[0], definition(attrs.evolve(m, **wrong), 0)
    assert not torch.allclose(keys[1:3].double(), want[1:3], rtol=1e-2, atol=1e-2)


def test_only_what_a_later_call_needs_is_kept() -> None:
    """14 tokens in groups of 4 with overlap: tokens 8 .. 13 are kept, the earlier ones are not."""
    m = _fixed(lengths=[14], block=16)
    states = States(m)
    run(m, [], states)
    page = states.kv[int(states.table[0, 0])]
    assert (page[:8] == 77).all()
    assert (page[8:14] != 77).all()
    assert (page[14:] == 77).all()
    assert (states.cache[0] == 77).all()
    x, weights = m.tokens()[0], m.weights()
    torch.testing.assert_close(page[8:14], x[8:] @ weights["wkv"].T, rtol=1e-5, atol=1e-5)
    score = x[8:] @ weights["wgate"].T + weights["ape"][[0, 1, 2, 3, 0, 1]]
    kept = states.score[int(states.table[0, 0])][8:14]
    torch.testing.assert_close(kept, score, rtol=1e-5, atol=1e-5)


def test_table_entry_0_is_not_written() -> None:
    m = _fixed(lengths=[14], block=16)
    states = States(m)
    states.table.zero_()
    out, *_ = ops.compressor(**call(m, states, [0], [14]))
    assert out[:3].all()
    assert (states.cache == 77).all()


def test_a_lost_state_changes_later_keys() -> None:
    m = _fixed(lengths=[14])
    states = States(m)
    ops.compressor(**call(m, states, [0], [6]))
    states.cache.zero_()
    out, *_ = ops.compressor(**call(m, states, [6], [14]))
    assert not torch.allclose(out[:2].double(), definition(m, 0)[1:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype_and_is_close(dtype: torch.dtype) -> None:
    m = _fixed()
    floats = ("x", "wkv", "wgate", "norm_weight", "rope_sin", "rope_cos")
    exact = call(m, States(m), [0, 0], m.lengths)
    rounded = exact | {name: exact[name].to(dtype) for name in floats}
    widened = exact | {name: rounded[name].float() for name in floats}
    out, *_ = ops.compressor(**(rounded | _states(m)))
    want, *_ = ops.compressor(**(widened | _states(m)))
    assert out.dtype == dtype
    tolerance = ops.compressor.tolerances[dtype]
    torch.testing.assert_close(out.float(), want, rtol=tolerance.rtol, atol=tolerance.atol)


def _states(m: Model) -> dict[str, torch.Tensor]:
    states = States(m)
    return {"kv_state": states.kv, "score_state": states.score}


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        ("cu_seqlens", (1,), 15, r"cu_seqlens\[2\] = 9 after 15"),
        ("cu_seqlens", (2,), 99, r"cu_seqlens\[2\] = 99 of 10 tokens"),
        ("start_pos", (1,), -4, r"start_pos\[1\] = -4"),
        ("start_pos", (0,), 12, r"kv_block_table\[0, 5\] is beyond the 5 columns"),
        ("kv_block_table", (0, 1), 11, r"kv_block_table\[0, 1\] = 11 of 11 blocks"),
        ("score_block_table", (1, 2), -1, r"score_block_table\[1, 2\] = -1"),
    ],
)
def test_sanitizer_names_the_first_bad_element(
    name: str, place: tuple[int, ...], value: int, text: str
) -> None:
    m = _fixed()
    arguments = call(m, States(m), [6, 5], [11, 9])
    with ops.sanitize():
        ops.compressor(**arguments)
    arguments[name] = arguments[name].clone()
    arguments[name][place] = value
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.compressor(**arguments)


def test_sanitizer_names_a_length_beyond_the_tokens() -> None:
    m = _fixed(batched=True)
    arguments = call(m, States(m), [0, 0], m.lengths)
    arguments["seqused"] = torch.tensor([14, 16], dtype=INT)
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"seqused\[1\] = 16, room for 15"):
        ops.compressor(**arguments)


def test_names_and_order_are_the_vendors() -> None:
    signature = inspect.signature(ops.CompressorArguments)
    assert list(signature.parameters) == VENDOR_PARAMETERS.split()
    m = _fixed()
    record = ops.compressor.bind(**call(m, States(m), [0, 0], m.lengths))
    vendor = ops.compressor.npu_calls["cann_ops_transformer"](record)
    names = VENDOR_PARAMETERS.split()
    assert vendor.function == "compressor"
    positional = [getattr(record, name) for name in names[:9]]
    assert all(one is other for one, other in zip(vendor.args, positional, strict=True))
    assert set(vendor.kwargs) == set(names[9:]) - {"seqused"}
    assert vendor.kwargs["rotary_mode"] == 2


def _torch_call(m: Model) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    arguments = call(m, States(m), [0, 0], m.lengths)
    arguments |= {name: arguments[name].clone() for name in ("kv_state", "score_state")}
    names = VENDOR_PARAMETERS.split()[:9]
    return tuple(arguments.pop(name) for name in names), arguments


@pytest.mark.parametrize("batched", [True, False])
def test_opcheck(batched: bool) -> None:
    args, kwargs = _torch_call(_fixed(batched=batched))
    torch.library.opcheck(
        torch.ops.ascend_attn.compressor,
        args,
        kwargs,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )


def test_compiles_whole_and_gives_the_same() -> None:
    args, kwargs = _torch_call(_fixed())

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ascend_attn.compressor(x, *args[1:], **kwargs)[0] * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(args[0]), twice(args[0]))

"""The cost model against its formula, written apart from it, and simulated schedules."""

from __future__ import annotations

import pytest

from ascend_hwprofile import HwProfileError, profile_for
from ascend_specdecode import ArgumentError, EngineConfig, Mode
from ascend_specdecode.simulator import (
    DeadlockError,
    ModelShape,
    Workload,
    decode_cost,
    measure_speed,
    model_shape,
    model_shapes,
    run_virtual,
)


def test_reading_weights_dominates_a_small_batch() -> None:
    """Qwen3-8B in bfloat16 on A5: 8.19e9 x 2 bytes at 80 % of 1600 GB/s."""
    cost = decode_cost("A5", "qwen3-8b", host_seconds=0.001)
    assert cost.seconds(1, 0) == pytest.approx(0.001 + 8_190_735_360 * 2 / (0.8 * 1600e9))
    assert cost.seconds(4, 0) == cost.seconds(1, 0)  # four tokens cost what one costs
    cache = 2 * 36 * 8 * 128 * 2
    more = cost.seconds(1, 100_000) - cost.seconds(1, 0)
    assert more == pytest.approx(100_000 * cache / (0.8 * 1600e9))


def test_multiplying_dominates_a_large_batch() -> None:
    cost = decode_cost("A5", "qwen3-8b")
    peak = profile_for("A5").peak_tflops("bfloat16")
    assert peak is not None
    assert cost.seconds(4096, 0) == pytest.approx(2 * 8_190_735_360 * 4096 / (0.8 * peak * 1e12))


def test_smaller_weights_are_read_faster() -> None:
    wide, narrow = (decode_cost("A5", "qwen3-8b", dtype=name) for name in ("bfloat16", "int8"))
    assert narrow.seconds(1, 0) == pytest.approx(wide.seconds(1, 0) / 2)


def test_shapes_have_a_source_and_sensible_sizes() -> None:
    for name, shape in model_shapes().items():
        assert shape.name == name
        assert "config.json" in shape.source
        assert 1e8 < shape.parameters < 1e11
    assert model_shape("qwen3-8b").cache_bytes == 147_456


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gpt-9"}, "model: found 'gpt-9', allowed one of smollm2-135m, "),
        ({"dtype": "fp3"}, "dtype: found 'fp3', allowed one of float16"),
        ({"efficiency": 0.0}, "efficiency: found 0.0, allowed a number above 0"),
        ({"host_seconds": -1.0}, "host_seconds: found -1.0, allowed seconds >= 0"),
        ({"bandwidth_gbps": 0.0}, "bandwidth_gbps: found 0.0, allowed GB/s > 0"),
        ({"soc": "A3"}, "bandwidth_gbps: found None, and no source states it for Ascend910_9391"),
        ({"soc": "Ascend950PR_950z"}, "bandwidth_gbps: found None"),
        ({"soc": "Ascend950PR_950z", "bandwidth_gbps": 100.0}, "a SoC with a known peak rate"),
        ({"soc": "310P", "dtype": "float8_e4m3"}, "dtype: found 'float8_e4m3', allowed"),
    ],
)
def test_bad_costs_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        decode_cost(**({"soc": "A5", "model": "qwen3-8b"} | arguments))  # type: ignore[arg-type]


def test_an_unknown_soc_is_refused() -> None:
    with pytest.raises(HwProfileError, match="unknown SoC"):
        decode_cost("A7", "qwen3-8b")


def test_a_bandwidth_that_no_source_states_can_be_given() -> None:
    shape = ModelShape("tiny", 1_000_000_000, 2, 2, 64, "made for this test")
    cost = decode_cost("A3", shape, bandwidth_gbps=1000.0)
    assert cost.seconds(1, 0) == pytest.approx(2e9 / 0.8e12)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_schedule_takes_the_time_of_its_calls(mode: Mode) -> None:
    """Plain decoding of one request: one call for the prompt, one for each further token."""
    target, draft = decode_cost("A5", "qwen3-8b"), decode_cost("A5", "qwen3-0_6b")
    result = measure_speed(
        Workload(requests=1, prompt=10, tokens=20),
        EngineConfig(mode=mode, num_speculative_tokens=0),
        score_seconds=target.score,
        draft_seconds=draft.draft(20),
    )
    calls = [target.seconds(10, 10)] + [target.seconds(1, 10 + done) for done in range(1, 20)]
    assert result.seconds == pytest.approx(sum(calls))
    assert result.tokens_per_second == pytest.approx(20 / sum(calls))


def test_speculation_pays_on_a_memory_bound_target() -> None:
    target, draft = decode_cost("A5", "qwen3-8b"), decode_cost("A5", "qwen3-0_6b")

    def seconds(k: int, chance: float) -> float:
        return measure_speed(
            Workload(requests=8, prompt=64, tokens=100, chance=chance),
            EngineConfig(num_speculative_tokens=k, adaptive=None),
            score_seconds=target.score,
            draft_seconds=draft.draft(100),
        ).seconds

    assert seconds(0, 0.9) / seconds(4, 0.9) > 2.0
    assert seconds(0, 0.0) / seconds(4, 0.0) < 0.9


@pytest.mark.parametrize("field", ["requests", "prompt", "tokens"])
def test_an_empty_workload_is_refused(field: str) -> None:
    with pytest.raises(ArgumentError, match=f"{field}: found 0, allowed an integer >= 1"):
        Workload(**{field: 0})


def test_waiting_for_nobody_is_noticed() -> None:
    import anyio

    with pytest.raises(DeadlockError, match="no timer is set"):
        run_virtual(anyio.sleep_forever)


def test_a_backend_must_exist() -> None:
    with pytest.raises(ArgumentError, match="backend: found 'curio'"):
        run_virtual(lambda: None, "curio")  # type: ignore[arg-type, return-value]

from __future__ import annotations

import pytest
from ascend_demo.metrics import Speculation, parse_speculation, parse_steps

# The names and labels that vLLM 0.30 writes, with another engine's labels beside them.
TEXT = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:generation_tokens_total{engine="0",model_name="m"} 99.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 31.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 31.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 140.0
"""


def test_counters_are_read() -> None:
    counted = parse_speculation(TEXT)
    assert counted == Speculation(10, 40, 12, (8, 4))
    assert counted.acceptance_length == pytest.approx(2.2)
    assert counted.acceptance_per_position == (0.8, 0.4)


def test_difference_is_of_one_request() -> None:
    earlier = Speculation(4, 16, 5, (5,))
    assert parse_speculation(TEXT).since(earlier) == Speculation(6, 24, 7, (3, 4))


def test_no_drafts_have_no_length() -> None:
    assert Speculation(0, 0, 0, (0, 0)).acceptance_length is None
    assert Speculation(0, 0, 0, (0, 0)).acceptance_per_position == ()


def test_missing_counter_is_named() -> None:
    text = TEXT.replace("accepted_tokens_total", "agreed_tokens_total")
    with pytest.raises(ValueError, match="no vllm:spec_decode_num_accepted_tokens_total"):
        parse_speculation(text)


def test_steps_are_read() -> None:
    assert parse_steps(TEXT) == 31
    with pytest.raises(ValueError, match="no vllm:iteration_tokens_total_count"):
        parse_steps(TEXT.replace("iteration_tokens", "step_tokens"))

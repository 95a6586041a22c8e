"""Sequences, sampling parameters, requests, proposals and settings: what they hold and refuse."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import (
    GREEDY,
    ArgumentError,
    EngineConfig,
    Proposal,
    Request,
    SamplingParameters,
    SequenceState,
    TokenBuffer,
)

tokens = st.lists(st.integers(0, 9), max_size=20)


@given(st.lists(tokens, max_size=30))
def test_a_buffer_is_its_appended_tokens_and_views_stay(parts: list[list[int]]) -> None:
    buffer, expected = TokenBuffer(), []
    views = []
    for part in parts:
        buffer.append(part)
        expected += part
        views.append((buffer.view(0, len(buffer)), list(expected)))
    assert len(buffer) == len(expected)
    for view, then in views:
        assert view.tolist() == then


def test_a_view_is_not_a_copy_and_cannot_be_written() -> None:
    buffer = TokenBuffer([1, 2, 3])
    view = buffer.view(1, 3)
    assert np.shares_memory(view, buffer.view(0, 3))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7
    assert buffer.view(0, 3).tolist() == [1, 2, 3]


def test_going_back_is_a_length() -> None:
    state = SequenceState.of([5, 6, 7, 8], prompt_length=2)
    shorter = state.at(3)
    assert shorter.verified.tolist() == [5, 6, 7]
    assert shorter.origin is state.origin
    assert shorter.prompt_length == 2
    assert state.since(2).tolist() == [7, 8]
    with pytest.raises(ArgumentError, match=r"length: found 5, allowed 0..4"):
        state.at(5)


def test_assumed_tokens_follow_the_verified_ones() -> None:
    state = SequenceState.of(np.array([5, 6], dtype=np.int32), 3)
    ahead = state.assume([7]).assume([8])
    assert ahead.assumed == (7, 8)
    assert ahead.tokens.tolist() == [5, 6, 7, 8]
    assert len(ahead) == 4
    assert ahead.verified.tolist() == state.tokens.tolist() == [5, 6]
    assert np.shares_memory(state.tokens, ahead.verified)
    assert ahead.sequence_id == 3
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ahead.length = 1  # type: ignore[misc]  # the assignment is what must fail


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[1]], "tokens: found 2 dimensions, allowed 1 dimension"),
        ([1.5], "tokens: found dtype float64, allowed integer token ids"),
        ([1, -1], r"tokens\[1\]: found -1, allowed token ids >= 0"),
    ],
)
def test_a_buffer_refuses_what_is_no_token(bad: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TokenBuffer(bad)


def test_a_part_of_a_proposal_keeps_its_probabilities() -> None:
    probabilities = torch.arange(12.0).reshape(3, 4)
    proposal = Proposal((4, 5, 6), probabilities)
    assert proposal.first(3) is proposal
    part = proposal.first(2)
    assert (part.tokens, part.parents) == ((4, 5), None)
    assert part.probabilities is not None
    assert torch.equal(part.probabilities, probabilities[:2])
    assert Proposal((4, 5)).first(1).probabilities is None
    assert proposal.first(0).tokens == ()
    assert Proposal((4, 5, 6), parents=(-1, 0, -1)).first(2).parents == (-1, 0)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_proposal_takes_what_drafters_have(kind: Any) -> None:
    proposal = Proposal(kind([4, 5]), parents=kind([-1, 0]))
    assert (proposal.tokens, proposal.parents) == ((4, 5), (-1, 0))
    assert {type(token) for token in proposal.tokens} == {int}


def test_greedy_is_the_default() -> None:
    assert SamplingParameters() == GREEDY
    assert GREEDY.greedy
    assert not GREEDY.adjusts_logits
    assert not SamplingParameters(temperature=0.7).greedy


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: -math.inf}},
    ],
)
def test_what_adjusts_logits(field: dict[str, Any]) -> None:
    assert SamplingParameters(**field).adjusts_logits


def test_a_bias_cannot_be_changed_from_outside() -> None:
    bias = {3: 1.0}
    sampling = SamplingParameters(logit_bias=bias)
    bias[3] = 9.0
    assert dict(sampling.logit_bias) == {3: 1.0}
    with pytest.raises(TypeError):
        sampling.logit_bias[3] = 2.0  # type: ignore[index]  # the assignment is what must fail


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"temperature": -0.1}, "temperature: found -0.1, allowed a finite number >= 0"),
        ({"temperature": math.nan}, "temperature: found nan"),
        ({"temperature": "1"}, "temperature: found '1'"),
        ({"top_k": -1}, "top_k: found -1, allowed an integer >= 0"),
        ({"top_k": 1.0}, "top_k: found 1.0"),
        ({"top_p": 0.0}, "top_p: found 0.0, allowed a number above 0 and up to 1"),
        ({"top_p": 1.1}, "top_p: found 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: found 0.0, allowed a finite number > 0"),
        ({"presence_penalty": 2.5}, "presence_penalty: found 2.5, allowed a number in -2..2"),
        ({"frequency_penalty": -3}, "frequency_penalty: found -3"),
        ({"seed": -1}, "seed: found -1, allowed an integer >= 0"),
        ({"seed": 2**63}, "seed: found 9223372036854775808, allowed at most"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias token: found -1"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\]: found inf, allowed a number below"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\]: found nan"),
    ],
)
def test_bad_sampling_is_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParameters(**field)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"prompt": []}, "prompt: found no token, allowed at least 1 token"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0, allowed an integer >= 1"),
        ({"priority": 0.5}, "priority: found 0.5, allowed an integer"),
        ({"time_limit": 0.0}, "time_limit: found 0.0, allowed seconds > 0, or None"),
        ({"time_limit": math.inf}, "time_limit: found inf"),
    ],
)
def test_bad_requests_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Request(**({"prompt": [1]} | field))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"mode": "fast"}, "mode: found 'fast', allowed 'lockstep' or 'pipelined'"),
        ({"when_full": "drop"}, "when_full: found 'drop', allowed 'wait' or 'refuse'"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: found -1, allowed an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs: found 0, allowed an integer >= 1"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            r"max_num_batched_tokens: found 8, allowed at least max_num_seqs \(9\)",
        ),
        ({"max_cached_tokens": 1}, "max_cached_tokens: found 1, allowed an integer >= 2"),
        ({"prefill_chunk": 0}, "prefill_chunk: found 0"),
        ({"max_waiting": 0}, "max_waiting: found 0"),
        ({"max_queued_events": 0}, "max_queued_events: found 0"),
        ({"draft_time_limit": 0.0}, "draft_time_limit: found 0.0, allowed seconds > 0, or None"),
        ({"score_time_limit": -1.0}, "score_time_limit: found -1.0"),
        ({"draft_failure_limit": 0}, "draft_failure_limit: found 0"),
        ({"aging": 0.0}, "aging: found 0.0"),
        ({"trace_capacity": -1}, "trace_capacity: found -1"),
        ({"seed": -1}, "seed: found -1"),
    ],
)
def test_bad_settings_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        EngineConfig(**field)

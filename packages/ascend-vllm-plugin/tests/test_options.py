import pytest
import torch

from ascend_attn_backends import BackendRequest
from ascend_vllm_plugin import OptionError, Options
from ascend_vllm_plugin.options import GATE_MODES, options_from


@pytest.mark.parametrize("given", [{}, {"ascend": {}}, {"other": {"x": 1}}, None, object()])
def test_defaults(given):
    assert options_from(given) == Options(ngram_min=2, ngram_max=4, draft_flash_attn="strict")


def test_values():
    assert options_from({"ascend": {"ngram_min": 3, "ngram_max": 5}}) == Options(3, 5)
    drafters = {"composite": "race", "composite_drafters": ["ngram"], "adaptive_k": True}
    assert options_from({"ascend": drafters}).composite_drafters == ("ngram",)


@pytest.mark.parametrize("mode", GATE_MODES)
def test_the_modes_of_the_gate_are_those_of_the_backends(mode):
    options = options_from({"ascend": {"draft_flash_attn": mode}})
    request = BackendRequest(
        head_size=64,
        num_heads=4,
        num_kv_heads=2,
        dtype=torch.float16,
        draft_flash_attn=options.draft_flash_attn,
    )
    assert request.draft_flash_attn == mode


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ascend": 3}, "option ascend of --additional-config is 3: allowed is a mapping"),
        ({"ascend": {"ngrams": 1}}, "option ascend.ngrams of --additional-config is 1"),
        ({"ascend": {"ngram_min": 0}}, "is 0: allowed is a whole number of at least 1"),
        ({"ascend": {"ngram_max": "4"}}, "is '4': allowed is a whole number of at least 1"),
        ({"ascend": {"ngram_max": True}}, "is True: allowed is a whole number of at least 1"),
        ({"ascend": {"ngram_min": 5}}, "ascend.ngram_min of --additional-config is 5"),
        (
            {"ascend": {"draft_flash_attn": "on"}},
            "option ascend.draft_flash_attn of --additional-config is 'on': "
            "allowed is one of: strict, wide, off",
        ),
        ({"ascend": {"draft_flash_attn": ["wide"]}}, "allowed is one of: strict, wide, off"),
        ({"ascend": {"suffix_min_match": 0}}, "is 0: allowed is a whole number of at least 1"),
        (
            {"ascend": {"composite": "all"}},
            "option ascend.composite of --additional-config is 'all': "
            "allowed is one of: first, race",
        ),
        (
            {"ascend": {"composite_drafters": ["eagle"]}},
            "option ascend.composite_drafters of --additional-config is ['eagle']: "
            "allowed is a list, not empty, of: suffix, ngram",
        ),
        ({"ascend": {"composite_drafters": []}}, "is []: allowed is a list, not empty"),
        ({"ascend": {"composite_drafters": "ngram"}}, "is 'ngram': allowed is a list"),
        ({"ascend": {"draft_deadline_ms": -1}}, "is -1: allowed is a number of milliseconds"),
        ({"ascend": {"draft_deadline_ms": "5"}}, "is '5': allowed is a number of milliseconds"),
        ({"ascend": {"draft_deadline_ms": True}}, "is True: allowed is a number"),
        ({"ascend": {"draft_deadline_ms": float("nan")}}, "is nan: allowed is a number"),
        ({"ascend": {"adaptive_k": 1}}, "is 1: allowed is true or false"),
        (
            {"ascend": {"training_consistency": "yes"}},
            "option ascend.training_consistency of --additional-config is 'yes': "
            "allowed is true or false",
        ),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(OptionError) as raised:
        options_from(given)
    assert message in str(raised.value)

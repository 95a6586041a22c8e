"""Which backend takes a layer whose keys, heads or tokens are spread over ranks, and why not."""

from __future__ import annotations

import attrs
import pytest
import torch
from attn_backends_support import TOLERANCES, Scenario
from cp_support import Layout, joined, latent_rank, on_ranks, sparse_rank, standard_rank
from latent_support import LatentScenario
from sparse_oracle import SparseStep

from ascend_attn_backends import (
    AscendAttentionDCPBackend,
    AscendDSADCPBackend,
    AscendMlaPCPBackend,
    AscendSFADCPBackend,
    AscendSFAPCPBackend,
    AttentionBackend,
    BackendRequest,
    select_backend,
)
from ascend_attn_ops import OpArgumentError, use_profile
from ascend_hwprofile import profile_for

BF16 = torch.bfloat16
REQUESTS = {
    "standard": BackendRequest(head_size=128, num_heads=8, num_kv_heads=1, dtype=BF16),
    "mla": BackendRequest(use_mla=True, head_size=576, num_heads=16, num_kv_heads=1, dtype=BF16),
    "sfa": BackendRequest(
        use_mla=True, use_sparse=True, head_size=576, num_heads=16, num_kv_heads=1, dtype=BF16
    ),
    "dsa": BackendRequest(
        use_mla=True,
        use_compress=True,
        head_size=512,
        num_heads=16,
        num_kv_heads=1,
        dtype=BF16,
        compress_ratio=4,
        compressed_top_k=512,
    ),
}
# (ranks that share keys, ranks of these that share tokens) -> ending of the backend's name.
SIZES = {(1, 1): "", (2, 1): "_dcp", (4, 1): "_dcp", (2, 2): "_pcp", (4, 2): "_pcp"}
FAMILIES = {"standard": ["A2", "A3", "A5"], "mla": ["A2", "A3", "A5"], "sfa": ["A2", "A3", "A5"]}
FAMILIES["dsa"] = ["A3", "A5"]


def of(kind: str, keys: int, tokens: int = 1, **changes: object) -> BackendRequest:
    return attrs.evolve(
        REQUESTS[kind],
        context_parallel_size=keys,
        prefill_context_parallel_size=tokens,
        **changes,
    )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", REQUESTS)
def test_the_table(kind: str, sizes: tuple[int, int]) -> None:
    backend = kind + SIZES[sizes]
    spread = kind in ("mla", "sfa") or not backend.endswith("_pcp")
    for family in FAMILIES[kind]:
        selection = select_backend(of(kind, *sizes), profile_for(family))
        assert selection.backend == (backend if spread else None)
        accepted = [verdict.backend for verdict in selection.verdicts if verdict.accepted]
        assert accepted == ([backend] if spread else [])
        if spread:
            assert selection.backend_class.name == backend


@pytest.mark.parametrize("kind", REQUESTS)
def test_310p_has_no_operator_for_it(kind: str) -> None:
    """Simulated neither: its operators return no lse."""
    request = of(kind, 2, dtype=torch.float16, provider="cpu")
    assert select_backend(request, profile_for("310P")).backend is None


REFUSED: dict[str, tuple[type[AttentionBackend], BackendRequest, str, str]] = {
    "standard_dcp.context_parallel_size": (
        AscendAttentionDCPBackend,
        of("standard", 1),
        "1",
        "at least 2",
    ),
    "standard_dcp.prefill_context_parallel_size": (
        AscendAttentionDCPBackend,
        of("standard", 2, 2),
        "2",
        "1",
    ),
    "standard_dcp.sliding_window": (
        AscendAttentionDCPBackend,
        of("standard", 2, sliding_window=128),
        "128",
        "None",
    ),
    "standard_dcp.has_sinks": (
        AscendAttentionDCPBackend,
        of("standard", 2, has_sinks=True),
        "True",
        "False",
    ),
    "standard_dcp.kv_cache_dtype": (
        AscendAttentionDCPBackend,
        of("standard", 2, kv_cache_dtype="int8"),
        "int8",
        "auto or bfloat16",
    ),
    "standard_dcp.num_heads": (
        AscendAttentionDCPBackend,
        of("standard", 3, num_heads=4, num_kv_heads=2),
        "4 heads on each of 3 ranks",
        "a divisor or a multiple of 6",
    ),
    "mla_pcp.prefill_context_parallel_size": (
        AscendMlaPCPBackend,
        of("mla", 2),
        "1",
        "at least 2",
    ),
    "mla_pcp.context_parallel_size": (
        AscendMlaPCPBackend,
        of("mla", 3, 2),
        "3",
        "a multiple of 2, the ranks that share tokens",
    ),
    "sfa_dcp.context_parallel_size": (AscendSFADCPBackend, of("sfa", 1), "1", "at least 2"),
    "sfa_dcp.prefill_context_parallel_size": (AscendSFADCPBackend, of("sfa", 2, 2), "2", "1"),
    "sfa_pcp.context_parallel_size": (
        AscendSFAPCPBackend,
        of("sfa", 4, 3),
        "4",
        "a multiple of 3, the ranks that share tokens",
    ),
    "sfa_pcp.use_sparse": (
        AscendSFAPCPBackend,
        of("sfa", 2, 2, use_sparse=False),
        "False",
        "True",
    ),
    "dsa_dcp.context_parallel_size": (AscendDSADCPBackend, of("dsa", 1), "1", "at least 2"),
    "dsa_dcp.prefill_context_parallel_size": (AscendDSADCPBackend, of("dsa", 2, 2), "2", "1"),
    "dsa_dcp.causal": (AscendDSADCPBackend, of("dsa", 2, causal=False), "False", "True"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_they_refuse(rule: str) -> None:
    backend, request, found, allowed = REFUSED[rule]
    refusals = backend.refusals(request, profile_for("A3"))
    (refusal,) = [entry for entry in refusals if entry.rule == rule]
    assert refusal.parameter == rule.split(".")[1]
    assert refusal.found == found
    assert refusal.allowed.startswith(allowed)
    assert refusal.source


def test_key_value_heads_that_do_not_divide() -> None:
    refusals = AscendAttentionDCPBackend.refusals(
        of("standard", 3, num_heads=3, num_kv_heads=2), profile_for("A3")
    )
    assert [(entry.rule, entry.allowed) for entry in refusals] == [
        (
            "standard_dcp.num_heads",
            "a multiple of 2 heads on all ranks, as many as key/value heads",
        )
    ]


@pytest.mark.parametrize(
    ("kind", "heads", "found"),
    [("mla", 16, "N 48"), ("sfa", 24, "72"), ("dsa", 16, "48")],
)
def test_gathered_heads_that_an_operator_lacks_are_refused(
    kind: str, heads: int, found: str
) -> None:
    """One rank's heads are fine, those of three ranks together are not."""
    profile = profile_for("A3")
    assert select_backend(of(kind, 1, num_heads=16), profile).backend == kind
    selection = select_backend(of(kind, 3, num_heads=heads), profile)
    assert selection.backend is None
    (verdict,) = [entry for entry in selection.verdicts if entry.backend == f"{kind}_dcp"]
    (refusal,) = verdict.refusals
    assert found in refusal.found


@pytest.mark.parametrize("family", ["A2", "A3", "A5"])
def test_calls_are_legal_on_products(family: str) -> None:
    """What the layers call is judged as the product would judge it."""
    lens, flags = ([4, 1, 20], [21, 9, 33]), [False, False, True]
    keys, tokens = Layout(heads=2), Layout(tokens=2)
    tolerance = TOLERANCES[BF16]
    with use_profile(profile_for(family)):
        grouped = Scenario(*lens, heads=4, kv_heads=1, head_size=128, dtype=BF16)
        grouped.compare(joined(on_ranks(keys, lambda r: standard_rank(grouped, keys, r)), keys))
        dense = LatentScenario(*lens, dtype=BF16)
        sparse = SparseStep(*lens, dtype=BF16)
        for layout in (keys, tokens):
            found = on_ranks(layout, lambda r, way=layout: latent_rank(dense, flags, way, r))
            output = torch.cat(found[: layout.heads], 1).double()
            torch.testing.assert_close(output, dense.expected()[0], **tolerance)
            on_ranks(layout, lambda r, way=layout: sparse_rank(sparse, flags, way, r))


def test_control_an_illegal_call_is_refused_on_every_rank() -> None:
    """Two ranks of three heads make six, which the operator lacks beside ropes."""
    layout, scenario = Layout(heads=2), LatentScenario([1], [9], heads=6, dtype=BF16)
    with use_profile(profile_for("A2")), pytest.raises(OpArgumentError, match="mla_heads"):
        on_ranks(layout, lambda ranks: latent_rank(scenario, [False], layout, ranks))

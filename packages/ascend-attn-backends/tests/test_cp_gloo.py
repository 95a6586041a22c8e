"""Every backend over shared keys, heads and tokens, on real gloo processes."""

from __future__ import annotations

import pytest
import torch
from attn_backends_support import TOLERANCES, Scenario
from cp_processes import DTYPES, cases, run_world, scenario
from cp_support import Layout, compare_sparse, joined
from dsa_steps import CompressedStep
from latent_support import LatentScenario
from sparse_oracle import SparseStep

Outputs = list[list[list[torch.Tensor]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outputs]:
    """Outputs ``[rank][case][tensor]`` of a world of two processes and of one of four."""
    return {size: run_world(size, tmp_path_factory.mktemp(f"gloo{size}")) for size in (2, 4)}


@pytest.mark.parametrize("size", [2, 4])
def test_processes_equal_the_formula(worlds: dict[int, Outputs], size: int) -> None:
    for place, (backend, layout, step, dtype) in enumerate(cases(size)):
        found = [outputs[place] for outputs in worlds[size]]
        compare(found, layout, scenario(backend, step, dtype), TOLERANCES[DTYPES[dtype]])


def compare(
    found: list[list[torch.Tensor]], layout: Layout, made: object, tolerance: dict[str, float]
) -> None:
    """Raises AssertionError when the ranks' outputs differ from the oracle."""
    if found[0][-1].dtype is torch.float32:
        output = joined([tensors[-1] for tensors in found], layout)
    else:  # ranks with the same heads may round differently
        output = torch.cat([tensors[-1] for tensors in found[: layout.heads]], 1)
    if isinstance(made, SparseStep):
        compare_sparse(made, found[0][0], output, tolerance)
        return
    if isinstance(made, CompressedStep):
        expected = made.plain().double()
    elif isinstance(made, LatentScenario):
        expected = made.expected()[0]
    else:
        assert isinstance(made, Scenario)
        expected = made.expected()
    torch.testing.assert_close(output.double(), expected, **tolerance)


def test_control_outputs_of_another_rank_differ(worlds: dict[int, Outputs]) -> None:
    """The comparison sees whose heads an output has."""
    place, (backend, layout, step, dtype) = next(
        (place, case) for place, case in enumerate(cases(2)) if case[:3:2] == ("standard", "mixed")
    )
    swapped = [outputs[place] for outputs in reversed(worlds[2])]
    with pytest.raises(AssertionError):
        compare(swapped, layout, scenario(backend, step, dtype), TOLERANCES[DTYPES[dtype]])

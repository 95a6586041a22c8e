"""What the host does in decode and draft steps, counted by the emulated runtime.

Run with ``pytest --ascend-emulator=A2|A3|A5``; skipped with the reason otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

emulator = pytest.importorskip("ascend_attn_ops.emulator")

import attrs  # noqa: E402
import torch  # noqa: E402
from npu_path.host_preparation import (  # noqa: E402
    SUBJECTS,
    Scale,
    Subject,
    naive_steps,
    shared_steps,
    work_of,
)

import ascend_attn_ops as ops  # noqa: E402

SCALE = Scale()
NAMED = {subject.name: subject for subject in SUBJECTS}


@pytest.fixture(autouse=True)
def npu(request: pytest.FixtureRequest) -> Iterator[Any]:
    try:
        npu = request.getfixturevalue("ascend_emulator")
    except pytest.FixtureLookupError:
        pytest.skip("the pytest plugin of ascend-attn-ops is not registered: install it again")
    emulator.provide_cann_ops_transformer()
    with ops.use_profile(npu.profile):
        yield npu


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest, npu: Any) -> Subject:
    found: Subject = request.param
    if npu.profile.family.value not in found.families:
        pytest.skip(f"{found.name} exists on {', '.join(found.families)} only")
    return found


def test_the_host_neither_copies_back_nor_waits(subject: Subject, npu: Any) -> None:
    """From the second step on; the first one makes what all share, such as the mask template."""
    first, *later = work_of(npu, shared_steps(subject, SCALE))
    assert len(later) == 3
    for work in later:
        assert (work.device_to_host_copies, work.synchronisations) == (0, 0)
        assert work.plans == (SCALE.geometries if subject.drafts else 0)
        assert work.launches > 0
    assert first.device_to_host_copies == 0


def test_a_naive_rebuild_is_counted(subject: Subject, npu: Any) -> None:
    """Control: the counters see two copies back, and a plan, for each layer."""
    for work in work_of(npu, naive_steps(subject, SCALE))[1:]:
        assert work.device_to_host_copies == 2 * SCALE.layers
        assert work.synchronisations >= 2 * SCALE.layers
        assert work.plans == (SCALE.layers if subject.drafts else 0)


def test_both_compute_the_same(subject: Subject) -> None:
    ours, theirs = (list(steps(subject, SCALE)) for steps in (shared_steps, naive_steps))
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)
    assert not torch.equal(ours[0][0], ours[-1][0])  # the steps differ


@pytest.mark.parametrize("windows", [(8,), (None, 8, 16), (None, 8, 16, 8, None)])
def test_plans_are_as_many_as_geometries(windows: tuple[int | None, ...], npu: Any) -> None:
    draft = NAMED["draft_flash"]
    if npu.profile.family.value not in draft.families:
        pytest.skip("flash_attn exists on A5 only")
    scale = Scale(windows=windows)
    found = [work.plans for work in work_of(npu, shared_steps(draft, scale))]
    assert found == [len(set(windows))] * 4


@pytest.mark.parametrize("name", ["standard", "mla"])
def test_lengths_that_only_the_device_knows_are_read_once_per_step(name: str, npu: Any) -> None:
    """Control of the host lengths: fused_infer_attention_score takes integers of the host."""
    without = attrs.evolve(NAMED[name], host_lengths=False)
    for work in work_of(npu, shared_steps(without, SCALE))[1:]:
        assert work.device_to_host_copies == 2

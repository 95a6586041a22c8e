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
    BLOCK_SIZE,
    SUBJECTS,
    Scale,
    Subject,
    bounds_only,
    decode_batch,
    device_only,
    naive_steps,
    shared_steps,
    work_of,
)

import ascend_attn_backends as backends  # noqa: E402
import ascend_attn_ops as ops  # noqa: E402
from ascend_attn_ops.emulator import TensorArgument  # noqa: E402

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
    """Control of the bounds: fused_infer_attention_score takes integers of the host."""
    without = attrs.evolve(NAMED[name], known=device_only)
    for work in work_of(npu, shared_steps(without, SCALE))[1:]:
        assert work.device_to_host_copies == 2
        assert work.synchronisations >= 2


@pytest.mark.parametrize(
    ("name", "operator"),
    [("standard", "aclnnFusedInferAttentionScore"), ("mla", "aclnnSparseFlashAttention")],
)
def test_device_lengths_reach_one_operator_per_layer(name: str, operator: str, npu: Any) -> None:
    with npu.record() as seen:
        outputs = next(shared_steps(NAMED[name], SCALE))
    calls = [call for call in seen.calls if call.operator.startswith(operator)]
    assert len(calls) == len(outputs) == SCALE.layers
    given = calls[0].arguments["actual_seq_lengths_kv"]
    on_device = isinstance(given, TensorArgument)
    assert on_device is (name == "mla")
    if not on_device:  # bounds on the host; which keys count, a mask made on the device says
        assert given == [length + row % 3 for row, length in enumerate(SCALE.lengths)]
        assert "atten_mask" in calls[0].described()


@pytest.mark.parametrize("name", ["standard", "mla"])
@pytest.mark.parametrize("flags", [[False, True, False], None])
def test_prompts_beside_open_requests_are_not_read_either(
    flags: list[bool] | None, name: str, npu: Any
) -> None:
    """A prompt's bound is its length; control: without that knowledge the step is read."""
    builder = NAMED[name].builder(BLOCK_SIZE)
    whole = backends.AttentionBatch.from_lengths(
        [1, 20, 2], [20, 40, 33], BLOCK_SIZE, is_prefilling=flags, device="npu"
    )
    assert whole.seq_lens_cpu is not None
    drafts = torch.tensor([1, 0, 2], dtype=torch.int32)
    batch = attrs.evolve(
        whole, seq_lens_cpu=None, seq_lens_cpu_upper_bound=whole.seq_lens_cpu + drafts
    )
    builder.build(batch)  # makes what all steps share
    with npu.record() as seen:
        metadata = builder.build(batch)
    copies = 0 if flags is not None else 1  # the query starts are known in both
    assert seen.counters.device_to_host_copies == copies
    assert (seen.counters.synchronisations > 0) is bool(copies)
    assert len(metadata.launches) == 1
    assert metadata.launches[0].num_tokens == (20 if flags is not None else 23)


@pytest.mark.parametrize("name", ["standard", "mla"])
def test_a_captured_step_follows_lengths_that_change_on_the_device(name: str, npu: Any) -> None:
    """With device lengths a graph needs no update of host lists: replay sees the new lengths."""
    subject = NAMED[name]
    layer, builder = subject.layers(SCALE)[0], subject.builder(BLOCK_SIZE)
    held = bounds_only(decode_batch(SCALE, 0))
    layer(builder.build(held))  # makes what all steps share
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = layer(builder.build(held))
    replayed = []
    for lengths in ((20, 9, 33), (7, 10, 34)):
        held.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        replayed.append(out.cpu())
        assert torch.equal(replayed[-1], layer(builder.build(held)).cpu())
    assert not torch.equal(*replayed)

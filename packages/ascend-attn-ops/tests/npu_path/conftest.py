"""Tests of the NPU path: provider -> torch_npu -> aclnn, on the emulated CANN runtime.

They run with ``pytest --ascend-emulator=A2|A3|A5``, one process for each SoC, and are skipped with
the reason otherwise. Below ``emulator run`` no option is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ascend_attn_ops.emulator import Emulator

HANDLES = ("tensors", "scalars", "int_arrays", "tensor_lists", "executors")


@pytest.fixture
def npu(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """The emulated NPU; no aclnn handle of a test outlives it.

    Except after a refused call: torch_npu raises before it destroys the handles of that call.
    """
    try:
        emulator: Emulator = request.getfixturevalue("ascend_emulator")
    except pytest.FixtureLookupError:
        pytest.skip("the pytest plugin of this package is not registered: install it again")
    before, refused = handles(emulator), emulator.counters.refused_calls
    yield emulator
    if emulator.counters.refused_calls == refused:
        assert handles(emulator) == before


def handles(npu: Emulator) -> dict[str, int]:
    return {name: count for name, count in npu.live.items() if name in HANDLES}


@pytest.fixture
def family(npu: Emulator) -> str:
    """A2, A3 or A5."""
    return npu.profile.family.value

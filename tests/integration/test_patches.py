"""Each patch to vLLM: still needed, and right where it is applied."""

from __future__ import annotations

import ast
import pkgutil
from typing import Any

import pytest
from engines import HERE, environment, run_script
from latent_probe import INDEXER_PATCHES

from ascend_vllm_plugin import patches
from ascend_vllm_plugin.compat import SINCE_0_31, require_supported_vllm
from ascend_vllm_plugin.patches import NPU_PATCHES, PATCHES
from ascend_vllm_plugin.patches.kernel_dispatchers import dispatchers

pytestmark = pytest.mark.engine

EXPECTED: dict[str, Any] = {
    # [5, recovered 9] and [7, bonus 2]: what the target said, up to the first mismatch.
    "_rejection_greedy_sample": [[5, 9, -1], [7, 2, -1]],
    "_rejection_random_sample": [[5, 9, -1], [7, 2, -1]],
    # 0.3 > 0.1 without token 0; 0.3 > 0.2 without token 2; 0.1 * 9 > 0.1 * 2 without token 1.
    "_sample_recovered_tokens": [1, 1, 0],
    "_expand": [[0.5, 0.5, 1.0, 1.0, 1.0], [4, 4, -1, -1, -1]],
    # Slot = block * 4 + offset: position 3 in block 10, position 4 in block 21, none at the end.
    "_eagle_step_slot_mapping_metadata": [[3, 4, 0], [43, 84, -1, -1, -1], [4, 5, 1]],
    # The last accepted position is 5: the drafts are at 6, 7 and 8, in blocks 11 and 12.
    "_copy_and_expand_dflash_inputs": {
        "out_input_ids_ptr": [77, 99, 99],
        "out_context_positions_ptr": [4, 5, 6],
        "out_query_positions_ptr": [6, 7, 8],
        "out_context_slot_mapping_ptr": [44, 45, 46],
        "out_query_slot_mapping_ptr": [46, 47, 48],
        "out_token_indices_ptr": [1, 2],
    },
}
VLLM = require_supported_vllm()
PATCHED = [name for _, name in dispatchers(VLLM)]

INDEXER = "test_latent_patches.py::test_patch_of_the_indexer_is_still_needed"
STILL_NEEDED = {
    "kernel_scan": "test_patches.py::test_the_search_for_kernels_still_stops_at_llvmlite",
    "kernel_dispatchers": "test_patches.py::test_the_patch_is_still_needed",
    "rotary_embedding": "test_latent_patches.py::test_rotary_embedding_is_still_needed",
    "indexer_cache": INDEXER,
    "indexer": INDEXER,
    "sparse_attn_indexer": INDEXER,
    "compressed_attention": "test_compressed_adapters.py::test_the_patch_is_still_needed",
    "dcp_merge": "test_latent_models.py::test_the_patch_dcp_merge_is_still_needed",
    "interpreter_masks": "test_dflash2.py::test_the_interpreter_still_refuses_the_kernels_mask",
    "dflash2_on_v1": "test_dflash2.py::test_the_v1_runner_still_refuses_dflash2",
}
"""Patch of simulate mode -> the test that fails when vLLM works without it."""

NO_PATCHES = {"replacement", "triton_interpreter"}
"""Modules beside the patches: how to replace a name, and the stage that is set before vLLM loads
its kernels, which `test_latent_patches.py` judges."""


def functions(file: str) -> set[str]:
    """Names of the functions of a file beside this one."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_patch_has_a_test_that_fails_when_it_is_not_needed() -> None:
    assert {patch.name for patch in PATCHES} == set(STILL_NEEDED)
    for test in STILL_NEEDED.values():
        file, name = test.split("::")
        assert name in functions(file), f"{test}: there is no such test"
    of_the_indexer = {name for name, test in STILL_NEEDED.items() if test == INDEXER}
    assert of_the_indexer == set(INDEXER_PATCHES)  # what that test is run with


def test_every_module_is_a_patch_that_is_listed_once() -> None:
    listed = [patch.name for patch in (*PATCHES, *NPU_PATCHES)]
    modules = {module.name for module in pkgutil.iter_modules(patches.__path__)}
    assert sorted(listed) == sorted(modules - NO_PATCHES)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """vLLM's dispatchers after vLLM's own set-up for CPUs."""
    folder = tmp_path_factory.mktemp("stock")
    return dict(run_script("patch_probe.py", {"patch": False}, folder, environment(False))[0])


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same with our patches."""
    folder = tmp_path_factory.mktemp("patched")
    return dict(run_script("patch_probe.py", {"patch": True}, folder, environment(False))[0])


def test_the_search_for_kernels_still_stops_at_llvmlite(
    stock: dict[str, Any], patched: dict[str, Any]
) -> None:
    searched = "error" in stock["placed"]
    assert searched is ("kernel_scan" in patched["applied"]), "vLLM searches rightly: no patch"
    assert "error" not in patched["placed"]
    if searched:
        assert "object has no attribute 'get'" in stock["placed"]["error"]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_patch_is_still_needed(name: str, stock: dict[str, Any]) -> None:
    found = stock["probes"][name]
    if name not in PATCHED:
        assert found == {"value": EXPECTED[name]}, f"vLLM does not run {name}: patch it"
        return
    if VLLM in SINCE_0_31:
        assert found != {"value": EXPECTED[name]}, f"vLLM runs {name} now: drop it from the patch"
        return
    assert "error" in found, f"vLLM runs {name} now: drop it from the patch"
    assert "Cannot inspect kernel parameters" in found["error"]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_patched_dispatcher_computes(name: str, patched: dict[str, Any]) -> None:
    assert "kernel_dispatchers" in patched["applied"]
    assert patched["probes"][name] == {"value": EXPECTED[name]}

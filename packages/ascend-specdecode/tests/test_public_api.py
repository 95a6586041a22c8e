from __future__ import annotations

import subprocess
import sys

import ascend_specdecode

PUBLIC_NAMES = {
    "PAD_TOKEN",
    "ArgumentError",
    "NgramDrafter",
    "NgramMatch",
    "SpecDecodeError",
    "TokenSequence",
    "find_ngram",
    "propose_ngram",
    "verify_greedy",
}


def test_exported_names_are_exactly_these() -> None:
    assert set(ascend_specdecode.__all__) == PUBLIC_NAMES
    assert all(hasattr(ascend_specdecode, name) for name in PUBLIC_NAMES)


def test_public_functions_and_classes_have_docstrings() -> None:
    for name in PUBLIC_NAMES - {"PAD_TOKEN", "TokenSequence"}:
        assert getattr(ascend_specdecode, name).__doc__, name


def test_import_brings_no_engine_and_no_device_library() -> None:
    code = (
        "import sys, ascend_specdecode; "
        "print(sorted({'vllm', 'torch_npu', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

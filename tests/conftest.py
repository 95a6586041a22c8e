"""The order in which files of tests begin where several workers share them."""

from __future__ import annotations

import pytest

LONGEST = (
    "test_latent_models.py",  # makes the engines that others look at, too
    "test_real.py",
    "test_smollm2.py",
    "test_soak.py",
    "test_serve_killed.py",
    "test_draft_engines.py",
    "test_specdecode_smollm2.py",
    "test_serve.py",
    "test_starting.py",
    "test_demo_glm_command.py",
    "test_demo_command.py",
)
"""They begin first, so that at the end no worker waits long for the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file; the order within a file stays."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))

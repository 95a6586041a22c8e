"""A model directory that cannot be explained."""

from __future__ import annotations

from pathlib import Path

from ..errors import AttentionBackendError


class ModelConfigError(AttentionBackendError, ValueError):
    """A config.json is missing, unreadable, or lacks what the choice of a backend needs.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, found: str, allowed: str) -> None:
        self.path = path
        super().__init__(f"{path}: found {found}; allowed: {allowed}")

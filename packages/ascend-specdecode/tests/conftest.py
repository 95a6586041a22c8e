from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # *_support modules, shared by these tests

settings.register_profile("ci", max_examples=100, deadline=None)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=10)
settings.register_profile("long", parent=settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

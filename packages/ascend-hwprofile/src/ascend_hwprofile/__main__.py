"""``python -m ascend_hwprofile`` is the command line."""

from __future__ import annotations

import sys

from ascend_hwprofile.cli import console

if __name__ == "__main__":
    sys.exit(console())

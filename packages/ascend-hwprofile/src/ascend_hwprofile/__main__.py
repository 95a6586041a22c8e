"""``python -m ascend_hwprofile`` is the command line."""

from __future__ import annotations

import sys

from ascend_hwprofile.cli import main

if __name__ == "__main__":
    sys.exit(main())

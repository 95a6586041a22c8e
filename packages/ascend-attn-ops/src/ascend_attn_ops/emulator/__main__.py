"""``python -m ascend_attn_ops.emulator``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

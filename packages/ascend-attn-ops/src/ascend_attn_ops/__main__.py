"""``python -m ascend_attn_ops``."""

import sys

from .cli import console

if __name__ == "__main__":
    sys.exit(console())

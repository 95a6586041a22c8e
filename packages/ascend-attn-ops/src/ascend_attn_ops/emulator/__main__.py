"""``python -m ascend_attn_ops.emulator``."""

import sys

from .cli import main

sys.exit(main())

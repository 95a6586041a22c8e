"""``python -m ascend_specdecode``: the same as the command ``ascend-specdecode``."""

import sys

from ascend_specdecode.cli import console

if __name__ == "__main__":
    sys.exit(console())

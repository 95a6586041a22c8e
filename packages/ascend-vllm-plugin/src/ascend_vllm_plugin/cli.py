"""`ascend-vllm`: look at what the plugin decided."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_vllm_plugin.errors import PluginError
from ascend_vllm_plugin.routing import read_routing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="ascend-vllm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    routing = commands.add_parser("routing", help="print a routing table written at start")
    routing.add_argument("file", type=Path, help="what ASCEND_VLLM_ROUTING_FILE named")
    given = parser.parse_args(arguments)
    try:
        print(read_routing(given.file).render())
    except PluginError as error:
        print(f"ascend-vllm: {error}", file=sys.stderr)
        return 2
    return 0

"""Cost of the emulated NPU: ``python bench_emulator.py [--json FILE]``; needs torch_npu and gcc.

Each turn is a process of its own: ``activate`` on a cached build (load the libraries, set the
device up), then the import of torch_npu, which a program on an NPU pays as well.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from ratios import Ratio, options, report

from ascend_attn_ops.emulator import build, emulated_profile

TURNS = 5
CHILD = """
import json, time
from ascend_attn_ops import emulator
start = time.perf_counter()
emulator.activate("A3", import_torch_npu=False)
active = time.perf_counter()
import torch_npu
imported = time.perf_counter()
print(json.dumps({"activate": (active - start) * 1e3, "import": (imported - active) * 1e3}))
"""


def turn() -> dict[str, float]:
    """Milliseconds of one fresh process."""
    output = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
    ).stdout
    times: dict[str, float] = json.loads(output.splitlines()[-1])
    return times


def ratios() -> list[Ratio]:
    """Medians over the turns, after one that warms the file cache up."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ASCEND_EMULATOR_CACHE"] = cache
        made = build(emulated_profile("A3"))
        turn()
        turns = [turn() for _ in range(TURNS)]
    median = {name: statistics.median(times[name] for times in turns) for name in turns[0]}
    ratio, seconds = median["activate"] / median["import"], made.manifest["seconds"]
    return [
        Ratio("emulated NPU: activate / import torch_npu", ratio, "<= 0.1", median),
        Ratio(
            "emulated NPU: seconds to build, once for each wheel and SoC", seconds, "<= 10",
            {"cores": float(os.cpu_count() or 1)},
        ),
    ]  # fmt: skip


def main() -> int:
    """Measure and report."""
    arguments = options(__doc__).parse_args()
    return report(ratios(), arguments.json)


if __name__ == "__main__":
    sys.exit(main())

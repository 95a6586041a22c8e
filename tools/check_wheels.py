"""Install our wheels into clean environments, layer by layer, and look at what came with them.

Usage: python tools/check_wheels.py WHEEL_DIR TORCH_REQUIREMENT
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# package -> distributions that must not come with it, by itself or through its dependencies
FORBIDDEN = {
    "ascend_hwprofile": {"torch", "numpy", "rich", "vllm", "anyio"},
    "ascend_attn_ops": {"vllm", "anyio", "torch-npu", "transformers"},
    "ascend_attn_backends": {"vllm", "anyio", "torch-npu", "transformers"},
    "ascend_specdecode": {"vllm", "torch-npu", "transformers"},
    "ascend_vllm_plugin": {"torch-npu"},
}


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check(package: str, wheels: Path, torch: str) -> str:
    """Install one wheel alone and import it; returns what was found.

    Raises:
        SystemExit: It does not install, brings what it must not, or does not import.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        (wheel,) = wheels.glob(f"{package}-*.whl")
        pins = [] if package == "ascend_hwprofile" else [torch]
        _run(python, "-m", "pip", "install", "-q", "--find-links", str(wheels), str(wheel), *pins)
        listed = json.loads(_run(python, "-m", "pip", "list", "--format", "json"))
        names = {entry["name"].lower().replace("_", "-") for entry in listed}
        unwanted = names & FORBIDDEN[package]
        if unwanted:
            raise SystemExit(f"{package} brings {', '.join(sorted(unwanted))}")
        _run(python, "-c", f"import {package}")
        return f"{package}: installs alone with {len(names)} distributions, imports"


def main() -> int:
    """Check every package; exit 2 on bad usage."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    wheels, torch = Path(sys.argv[1]), sys.argv[2]
    with ThreadPoolExecutor(max_workers=2) as pool:  # CI has two cores
        for line in pool.map(lambda package: check(package, wheels, torch), FORBIDDEN):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line of demo 2, with the fake server in vLLM's place: FOLDER MODE [ARGUMENTS...]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import demo_glm  # noqa: E402  # found through the path set above
import fakes  # noqa: E402
from ascend_demo.glm import Variant  # noqa: E402
from ascend_demo.server import ServerSettings  # noqa: E402


def write_tables(tables: Path, variant: Variant, profile: str) -> None:
    from glm_routing import DraftPlans, routing  # slow to import, and few cases need it

    for name, built in (("start", 0), ("end", 21)):
        text = routing(variant, profile, DraftPlans(2, 1, built, built, 0))
        (tables / f"{name}.json").write_text(text)


def main(folder: Path, mode: str, arguments: list[str]) -> int:
    def settings(
        variant: Variant, draft: Path, port: int, profile: str, work: Path, ready: float
    ) -> ServerSettings:
        (folder / "work").write_text(str(work.parent))
        tables = folder / f"routing-{variant.name}"
        if mode == "ok":
            tables.mkdir()
            write_tables(tables, variant, profile)
        made = fakes.fake_settings(mode, folder, port=port, ready=ready, grace=2.0)
        environment = {
            **made.environment,
            "ASCEND_VLLM_ROUTING_FILE": str(work / "routing.json"),
            "FAKE_ROUTING": str(tables) if mode == "ok" else "",
            "FAKE_PLAIN": "1" if variant.method is None else "",
        }
        return attrs.evolve(made, environment=environment, log=work / "server.log")

    replaced: Any = demo_glm
    replaced.glm_settings = settings
    return demo_glm.main(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

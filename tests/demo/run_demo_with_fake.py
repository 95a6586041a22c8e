"""The demo's own command line, with the fake server in vLLM's place: FOLDER MODE [ARGUMENTS...]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import demo  # noqa: E402  # found through the path set above
import fakes  # noqa: E402
from ascend_demo.model import MadeModel  # noqa: E402
from ascend_demo.server import ServerSettings  # noqa: E402


def main(folder: Path, mode: str, arguments: list[str]) -> int:
    def settings(model: Path, port: int, profile: str, work: Path, ready: float) -> ServerSettings:
        (folder / "work").write_text(str(work))
        made = fakes.fake_settings(mode, folder, port=port, ready=ready, grace=2.0)
        environment = {**made.environment, "ASCEND_VLLM_ROUTING_FILE": str(work / "routing.json")}
        return attrs.evolve(made, environment=environment, log=work / "server.log")

    def model(**_: Any) -> MadeModel:
        return MadeModel(folder, made=False)

    demo.server_settings = settings
    demo.make_model = model
    return demo.main(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

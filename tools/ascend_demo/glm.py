"""How demo 2 serves the tiny GLM: without a draft, with its MTP layer, with its DFlash2 draft."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_demo.chat import MODEL_NAME, Question
from ascend_demo.errors import SetupError
from ascend_demo.launch import routing_file, simulation
from ascend_demo.server import HOST, ServerSettings

ASSETS: Final = Path(__file__).parents[2] / "assets"
TARGET: Final = ASSETS / "tiny_glm"
DRAFT: Final = ASSETS / "tiny_glm_dflash"
DRAFT_TOKENS: Final = 3
MAX_MODEL_LEN: Final = 512
DTYPE: Final = "bfloat16"
"""What the weights are in; the gate takes no float32."""
MAX_TOKENS: Final = 64
WARM_UP: Final = Question("warm-up", "The while statement is used for", max_tokens=16)
QUESTIONS: Final = (
    Question("while", "The while statement is used for repeated execution", MAX_TOKENS),
    Question("class", "A class definition is an executable statement. The inheritance", MAX_TOKENS),
    Question("import", "The import statement combines two operations; it searches", MAX_TOKENS),
)


@attrs.frozen
class Variant:
    """One way to serve the target.

    Attributes:
        name: for the command line.
        title: for people.
        method: of vLLM's speculative decoding; None: no draft.
        gate: `draft_flash_attn` of the plugin, who may use the draft backend.
    """

    name: str
    title: str
    method: str | None = None
    gate: str = "strict"


VARIANTS: Final = (
    Variant("plain", "no draft"),
    Variant("mtp", f"MTP layer, k = {DRAFT_TOKENS}", "mtp"),
    Variant("dflash", f"DFlash2 draft, k = {DRAFT_TOKENS}, draft backend allowed", "dflash"),
    Variant("dflash-off", f"DFlash2 draft, k = {DRAFT_TOKENS}, draft backend off", "dflash", "off"),
)


def check_models(draft: Path) -> None:
    """Check that both models are there.

    Raises:
        SetupError: a folder is not a model, or the draft is not one for this target.
    """
    for option, folder in (("the tiny GLM", TARGET), ("--draft", draft)):
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise SetupError(f"{option}: found {folder} without {name}, allowed a model folder")
    try:
        config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
        architectures = config["architectures"]
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"--draft: {draft / 'config.json'} cannot be read: {error!r}") from error
    if architectures not in (["DFlashDraftModel"], ["DFlash2DraftModel"]):
        raise SetupError(
            f"--draft: found architectures {architectures}, "
            "allowed DFlashDraftModel or DFlash2DraftModel"
        )


def server_settings(
    variant: Variant, draft: Path, port: int, profile: str, work: Path, ready_seconds: float
) -> ServerSettings:
    """Describe the server of a variant; its log and routing table go to the folder `work`."""
    return ServerSettings(
        command=server_command(variant, draft, port),
        environment={
            **os.environ,
            **simulation(profile, routing_file(work)),
            # Lets the demo ask the worker for its plans; the server listens on 127.0.0.1 alone.
            "VLLM_SERVER_DEV_MODE": "1",
        },
        port=port,
        log=work / "server.log",
        ready_seconds=ready_seconds,
    )


def server_command(variant: Variant, draft: Path, port: int) -> tuple[str, ...]:
    """Return the command line that serves a variant."""
    options = {
        "--model": str(TARGET),
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": str(port),
        "--dtype": DTYPE,
        "--max-model-len": str(MAX_MODEL_LEN),
        "--max-num-seqs": "4",
    }
    if variant.method is not None:
        options["--speculative-config"] = json.dumps(speculation(variant, draft))
        options["--additional-config"] = json.dumps({"ascend": {"draft_flash_attn": variant.gate}})
    flat = [word for option in options.items() for word in option]
    module = "vllm.entrypoints.openai.api_server"
    # Prompts come once each: a cached prefix would only blur the times.
    plain = ("--enforce-eager", "--no-enable-prefix-caching")
    return (sys.executable, "-m", module, *flat, *plain)


def speculation(variant: Variant, draft: Path) -> Mapping[str, Any]:
    """vLLM's `--speculative-config` of a variant with a draft."""
    wanted = {"method": variant.method, "num_speculative_tokens": DRAFT_TOKENS}
    return wanted if variant.method == "mtp" else {**wanted, "model": str(draft)}

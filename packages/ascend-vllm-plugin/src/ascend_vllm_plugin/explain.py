"""The routing of a model that nobody loads: vLLM builds it, on a device that holds no data.

vLLM's own executor, worker, runner and drafter do what they do in an engine, up to the place where
weights would be read: its loader is one that creates the model on torch's device `meta` and stops.
So every layer asks for its backend just as it will when the model is served, on every rank.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_attn_backends import NoBackendError
from ascend_vllm_plugin.compat import require_platform, single_process_defaults
from ascend_vllm_plugin.environment import EXPLAIN, ROUTING_FILE, simulation_requested
from ascend_vllm_plugin.errors import (
    ModelFolderError,
    ModelRefusedError,
    NpuUnavailableError,
    PluginError,
    SimulationUnavailableError,
)
from ascend_vllm_plugin.model_folder import require_readable_options
from ascend_vllm_plugin.modes import expected_platform
from ascend_vllm_plugin.routing import RoutingTable, parse_routing

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import VllmConfig

LOAD_FORMAT = "ascend_nothing"
"""vLLM's name of the loader that loads nothing."""

KV_CACHE_BYTES = 1 << 20
"""Size of the cache, which is never made; without one vLLM would measure the memory."""


def register_loader() -> None:
    """Tell vLLM of the loader that loads nothing; in every process, before it builds a model."""
    import torch
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    class NothingLoader(BaseModelLoader):
        """Creates a model without data."""

        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """There is nothing to load."""

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            """The model, with parameters that have shapes and no values."""
            with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
                return self.create_model(vllm_config, model_config, prefix).eval()

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(LOAD_FORMAT)(NothingLoader)


def prepare_environment() -> None:
    """Set what the processes of vLLM read when they start; before vLLM is imported.

    Nothing is served, so no engine's routing file is written.
    """
    os.environ[EXPLAIN] = "1"
    os.environ.pop(ROUTING_FILE, None)
    for name, value in single_process_defaults().items():
        os.environ.setdefault(name, value)


def engine_arguments(model: str, options: Sequence[str]) -> EngineArgs:
    """vLLM's own reading of the options of an engine.

    Args:
        model: folder or name of the target.
        options: as `vllm serve` takes them; a wrong one ends the process with vLLM's message.

    Raises:
        EngineOptionError: an option that takes a JSON object has something else.
        ModelFolderError: there is no such model, or no such draft.
    """
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(  # type: ignore[no-untyped-call]
        prog="ascend-vllm explain",
        usage="ascend-vllm explain MODEL [--profile SOC] [--json] [options of vLLM's engine]",
        add_help=False,
    )
    EngineArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model", model, *options])
    try:
        arguments = EngineArgs.from_cli_args(parsed)
    except OSError as error:
        raise ModelFolderError(model, str(error)) from error
    require_readable_options(arguments)
    return arguments


def plain_message(error: BaseException) -> str:
    """The message of an error, for people.

    Of vLLM's validation errors what was wrong without the frame; of what neither vLLM nor this
    package meant as a message, such as an assertion of vLLM on a model that it cannot build, what
    it was and where to see more.
    """
    details = _details(error)
    if details is not None:
        return "\n".join(map(_cause, details))
    if isinstance(error, (OSError, ValueError, PluginError, NoBackendError)):
        return str(error)
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"vLLM cannot run this: {said}\n(VLLM_LOGGING_LEVEL=DEBUG shows where)"


def refused_by_us(error: BaseException) -> bool:
    """Whether a rule of this package refused something, rather than that vLLM failed."""
    details = _details(error)
    causes = [error] if details is None else [_raised(entry) for entry in details]
    return any(isinstance(cause, (PluginError, NoBackendError)) for cause in causes)


def _details(error: BaseException) -> list[Mapping[str, Any]] | None:
    """What pydantic found, of its errors."""
    details = getattr(error, "errors", None)
    return list(details()) if callable(details) else None


def _raised(entry: Mapping[str, Any]) -> Any:
    """The error that a check of vLLM or of this package raised, where it was one."""
    return entry.get("ctx", {}).get("error")


def _cause(entry: Mapping[str, Any]) -> str:
    """One of the errors that pydantic found."""
    error = _raised(entry)
    if error is not None:
        return str(error)
    place = ".".join(str(part) for part in entry["loc"])
    return f"{place}: {entry['msg']} (found {reprlib.repr(entry['input'])})"


def configuration(arguments: EngineArgs) -> VllmConfig:
    """The engine's configuration; it names the loader that loads nothing.

    Args:
        arguments: of the engine; `load_format`, tokenizer and cache size are set here.

    Raises:
        SimulationUnavailableError, NpuUnavailableError: vLLM did not take our platform.
        ValueError: vLLM, or a rule of ours, refuses the configuration.
    """
    require_platform(str(expected_platform()), _error_of_mode())
    register_loader()
    arguments.load_format = LOAD_FORMAT
    arguments.skip_tokenizer_init = True
    arguments.kv_cache_memory_bytes = KV_CACHE_BYTES
    config = arguments.create_engine_config()
    if config.parallel_config.world_size == 1:
        config.parallel_config.distributed_executor_backend = "uni"  # no process for one rank
    return config


def _error_of_mode() -> type[SimulationUnavailableError | NpuUnavailableError]:
    return SimulationUnavailableError if simulation_requested() else NpuUnavailableError


def explain(config: VllmConfig) -> RoutingTable:
    """The routing of every layer, target and draft.

    Args:
        config: of `configuration`.

    Raises:
        ModelRefusedError: nobody takes a layer, or the chosen backend does not take an argument of
            it; the message has every reason.
    """
    from vllm.v1.executor.abstract import Executor

    executor = Executor.get_class(config)(config)
    try:
        answers: list[str] = executor.collective_rpc("routing")
    finally:
        executor.shutdown()
    for answer in answers:
        refused = json.loads(answer).get("refused")
        if refused is not None:
            raise ModelRefusedError(refused)
    return parse_routing(answers[0])

"""vLLM on Ascend: routed, explained attention backends and drafters."""

from ascend_vllm_plugin.compat import SUPPORTED_VLLM, installed_vllm
from ascend_vllm_plugin.drafters import NgramProposer
from ascend_vllm_plugin.errors import (
    EnvironmentVariableError,
    LayerRefusedError,
    OptionError,
    PluginError,
    RoutingFileError,
    SimulationUnavailableError,
    UnsupportedVllmError,
)
from ascend_vllm_plugin.options import Options
from ascend_vllm_plugin.registration import register, register_general
from ascend_vllm_plugin.routing import RoutingRow, RoutingTable, read_routing

__all__ = [
    "SUPPORTED_VLLM",
    "EnvironmentVariableError",
    "LayerRefusedError",
    "NgramProposer",
    "OptionError",
    "Options",
    "PluginError",
    "RoutingFileError",
    "RoutingRow",
    "RoutingTable",
    "SimulationUnavailableError",
    "UnsupportedVllmError",
    "installed_vllm",
    "read_routing",
    "register",
    "register_general",
]

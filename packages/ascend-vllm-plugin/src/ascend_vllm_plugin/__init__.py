"""vLLM on Ascend: routed, explained attention backends and drafters.

Names load on first use: vLLM imports this package in every process in which it is installed,
whether anybody wants it there or not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_vllm_plugin.background_proposers import (
        BackgroundProposer,
        CompositeProposer,
        PromptLookupProposer,
        SuffixProposer,
    )
    from ascend_vllm_plugin.compat import SUPPORTED_VLLM, installed_vllm
    from ascend_vllm_plugin.drafters import NgramProposer
    from ascend_vllm_plugin.errors import (
        ConnectorSettingError,
        DraftRefusedError,
        EngineOptionError,
        EnvironmentVariableError,
        LayerRefusedError,
        ModelFolderError,
        ModelRefusedError,
        NotInThisBaseError,
        NpuBaseRefusedError,
        NpuUnavailableError,
        OptionError,
        PlatformConflictError,
        PluginError,
        PortInUseError,
        RoutingFileError,
        SimulationUnavailableError,
        StoredKeysError,
        UnknownConnectorError,
        UnsupportedVllmError,
    )
    from ascend_vllm_plugin.kv_transfer import TransferWindows
    from ascend_vllm_plugin.options import Options
    from ascend_vllm_plugin.registration import register, register_general
    from ascend_vllm_plugin.routing import RoutingRow, RoutingTable, read_routing
    from ascend_vllm_plugin.transfer_gate import TransferGate

__all__ = [
    "SUPPORTED_VLLM",
    "BackgroundProposer",
    "CompositeProposer",
    "ConnectorSettingError",
    "DraftRefusedError",
    "EngineOptionError",
    "EnvironmentVariableError",
    "LayerRefusedError",
    "ModelFolderError",
    "ModelRefusedError",
    "NgramProposer",
    "NotInThisBaseError",
    "NpuBaseRefusedError",
    "NpuUnavailableError",
    "OptionError",
    "Options",
    "PlatformConflictError",
    "PluginError",
    "PortInUseError",
    "PromptLookupProposer",
    "RoutingFileError",
    "RoutingRow",
    "RoutingTable",
    "SimulationUnavailableError",
    "StoredKeysError",
    "SuffixProposer",
    "TransferGate",
    "TransferWindows",
    "UnknownConnectorError",
    "UnsupportedVllmError",
    "installed_vllm",
    "read_routing",
    "register",
    "register_general",
]

_HOMES = {
    "SUPPORTED_VLLM": "compat",
    "BackgroundProposer": "background_proposers",
    "CompositeProposer": "background_proposers",
    "ConnectorSettingError": "errors",
    "DraftRefusedError": "errors",
    "EngineOptionError": "errors",
    "EnvironmentVariableError": "errors",
    "LayerRefusedError": "errors",
    "ModelFolderError": "errors",
    "ModelRefusedError": "errors",
    "NgramProposer": "drafters",
    "NotInThisBaseError": "errors",
    "NpuBaseRefusedError": "errors",
    "NpuUnavailableError": "errors",
    "OptionError": "errors",
    "Options": "options",
    "PlatformConflictError": "errors",
    "PluginError": "errors",
    "PortInUseError": "errors",
    "PromptLookupProposer": "background_proposers",
    "RoutingFileError": "errors",
    "RoutingRow": "routing",
    "RoutingTable": "routing",
    "SimulationUnavailableError": "errors",
    "StoredKeysError": "errors",
    "SuffixProposer": "background_proposers",
    "TransferGate": "transfer_gate",
    "TransferWindows": "kv_transfer",
    "UnknownConnectorError": "errors",
    "UnsupportedVllmError": "errors",
    "installed_vllm": "compat",
    "read_routing": "routing",
    "register": "registration",
    "register_general": "registration",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value

import pytest

import ascend_vllm_plugin


def test_exported_names():
    assert ascend_vllm_plugin.__all__ == [
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
    for name in ascend_vllm_plugin.__all__:
        assert hasattr(ascend_vllm_plugin, name)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ascend_vllm_plugin.nothing

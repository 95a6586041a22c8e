"""What this package raises: one class per situation, each building its own message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_attn_ops import Refusal


class PluginError(Exception):
    """Base of every error of this package."""


class EnvironmentVariableError(PluginError, ValueError):
    """An environment variable holds a value that its owner does not know."""

    def __init__(self, name: str, found: str, allowed: str) -> None:
        super().__init__(f"environment variable {name}={found!r}: allowed is {allowed}")
        self.name = name
        self.found = found
        self.allowed = allowed


class OptionError(PluginError, ValueError):
    """An entry of vLLM's `--additional-config` meant for this package is wrong."""

    def __init__(self, name: str, found: object, allowed: str) -> None:
        super().__init__(f"option {name} of --additional-config is {found!r}: allowed is {allowed}")
        self.name = name
        self.found = found
        self.allowed = allowed


class EngineOptionError(PluginError, ValueError):
    """An option of vLLM's engine has a value of a kind that vLLM does not expect there."""

    def __init__(self, name: str, found: object, allowed: str) -> None:
        super().__init__(f"{name} is {found!r}: allowed is {allowed}")
        self.name = name
        self.found = found
        self.allowed = allowed


class UnsupportedVllmError(PluginError, RuntimeError):
    """The installed vLLM is outside the supported range, or there is none."""

    def __init__(
        self,
        found: str | None,
        supported: str,
        distributions: Sequence[str],
        reason: str | None = None,
    ) -> None:
        names = " or ".join(distributions)
        what = f"vLLM {found} is installed" if found else f"no vLLM is installed ({names})"
        why = f" ({reason})" if reason else ""
        super().__init__(
            f"{what}; ascend-vllm-plugin works with vLLM {supported}{why}. Install a vLLM of that "
            "range, or run vLLM without this plugin: unset ASCEND_VLLM_SIMULATE, and on an NPU "
            "set ASCEND_VLLM_NPU=off."
        )
        self.found = found
        self.supported = supported


class SimulationUnavailableError(PluginError, RuntimeError):
    """Simulation was asked for, and this vLLM installation cannot simulate."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"ASCEND_VLLM_SIMULATE=1 has no effect: {reason}. {remedy}")
        self.reason = reason
        self.remedy = remedy


class NpuUnavailableError(PluginError, RuntimeError):
    """NPU mode was asked for, and vLLM cannot run in it here."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"NPU mode cannot start: {reason}. {remedy}")
        self.reason = reason
        self.remedy = remedy


class NpuBaseRefusedError(PluginError, RuntimeError):
    """The base of NPU mode that was asked for, or that is installed, cannot be taken."""

    def __init__(self, reason: str, misfits: Sequence[str], way_out: str) -> None:
        lines = [f"no overlay on vllm-ascend: {reason}", *(f"  {one}" for one in misfits)]
        lines.append(f"Set {way_out} to run without it, or install a vllm-ascend that fits.")
        super().__init__("\n".join(lines))
        self.reason = reason
        self.misfits = tuple(misfits)


class NotInThisBaseError(PluginError, ValueError):
    """The configuration asks for what a base of NPU mode does not have."""

    def __init__(self, base: str, refusals: Sequence[Refusal]) -> None:
        lines = [f"the {base} base of NPU mode does not take this configuration:"]
        super().__init__("\n".join(lines + [f"  {reason}" for reason in refusals]))
        self.base = base
        self.refusals = tuple(refusals)


class PlatformConflictError(PluginError, RuntimeError):
    """Another platform plugin of vLLM is active too; vLLM runs with one."""

    def __init__(self, rivals: Sequence[str], allow_list: str) -> None:
        super().__init__(
            f"two platform plugins want this vLLM: this one and {', '.join(rivals)}. Set "
            f"VLLM_PLUGINS={allow_list} to have this one, or unset ASCEND_VLLM_SIMULATE and set "
            "ASCEND_VLLM_NPU=off to leave vLLM to the other."
        )
        self.rivals = tuple(rivals)
        self.allow_list = allow_list


class ModelRefusedError(PluginError, ValueError):
    """The model is refused before its weights are loaded; the message has every reason."""


class LayerRefusedError(PluginError, ValueError):
    """The backend chosen for a layer does not take the layer's arguments."""

    def __init__(self, backend: str, refusals: Sequence[Refusal]) -> None:
        lines = [f"backend {backend} does not take this attention layer:"]
        super().__init__("\n".join(lines + [f"  {reason}" for reason in refusals]))
        self.backend = backend
        self.refusals = tuple(refusals)


class DraftRefusedError(PluginError, ValueError):
    """A draft model does not fit its target or its engine."""

    def __init__(self, draft: str, refusals: Sequence[Refusal]) -> None:
        lines = [f"the draft {draft} does not fit:"]
        super().__init__("\n".join(lines + [f"  {reason}" for reason in refusals]))
        self.draft = draft
        self.refusals = tuple(refusals)


class UnknownConnectorError(PluginError, ValueError):
    """A KV connector of `ascend_vllm_plugin.kv_transfer` that cannot be made."""

    def __init__(self, name: str, allowed: str) -> None:
        super().__init__(f"kv_connector {name}: allowed is {allowed}")
        self.name = name
        self.allowed = allowed


class ModelFolderError(PluginError, ValueError):
    """A model that was named cannot be read."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"the model {model!r}: {reason}; allowed is a folder with a config.json, or the name "
            "of a model on Hugging Face's hub"
        )
        self.model = model
        self.reason = reason


class ConnectorSettingError(PluginError, ValueError):
    """A setting of a KV connector of this package is wrong."""

    def __init__(self, name: str, found: object, allowed: str) -> None:
        super().__init__(f"kv_connector_extra_config: {name} is {found!r}: allowed is {allowed}")
        self.name = name
        self.found = found
        self.allowed = allowed


class StoredKeysError(PluginError, ValueError):
    """Stored keys and values cannot be used."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"the stored keys {path} are refused: {reason}")
        self.path = path
        self.reason = reason


class PortInUseError(PluginError, OSError):
    """The server cannot listen where it was told to."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"--port {port} on {host} cannot be used: {reason}; take another one")
        self.host = host
        self.port = port


class RoutingFileError(PluginError, ValueError):
    """A file given as a routing table is none."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is not a routing table of ascend-vllm-plugin: {reason}")
        self.path = path
        self.reason = reason

"""Direct two-stage aclnn calls through ctypes, without torch_npu; also the provider ``aclnn``.

API::

    from ascend_attn_ops.providers import aclnn

    with aclnn.Runtime(device=0) as npu:
        query = npu.upload(tensor)                  # torch CPU tensor or numpy array, with strides
        out = npu.empty((4, 16, 512), "bfloat16")
        npu.call("aclnnAbs", {"self": query, "out": out})    # names: ascend_attn_ops.aclnn_abi
        result = out.torch()                        # waits, copies back
        npu.counters                                # calls, live bytes, live handles ...

    prepared = npu.prepare("aclnnAbs", {...})       # first stage alone
    prepared.execute(*npu.workspace(prepared.workspace_size))

Each failure is an error of its own class, with code, symbol and CANN's text. Nothing is loaded
when this package is imported.
"""

from .counters import Counters
from .errors import (
    ArrayError,
    CannError,
    ClosedError,
    DirectCallError,
    ExecutorReusedError,
    HandleError,
    InvalidArgumentError,
    MissingOperatorError,
    NullPointerError,
    OutOfDeviceMemoryError,
    ShortWorkspaceError,
    TilingError,
)
from .libraries import Cann, library_folders, load, unavailable_reason
from .provider import (
    aclnn_operator,
    aclnn_provider,
    current_runtime,
    default_runtime,
    supported_operators,
)
from .runtime import DeviceTensor, PreparedCall, Runtime

__all__ = [
    "ArrayError",
    "Cann",
    "CannError",
    "ClosedError",
    "Counters",
    "DeviceTensor",
    "DirectCallError",
    "ExecutorReusedError",
    "HandleError",
    "InvalidArgumentError",
    "MissingOperatorError",
    "NullPointerError",
    "OutOfDeviceMemoryError",
    "PreparedCall",
    "Runtime",
    "ShortWorkspaceError",
    "TilingError",
    "aclnn_operator",
    "aclnn_provider",
    "current_runtime",
    "default_runtime",
    "library_folders",
    "load",
    "supported_operators",
    "unavailable_reason",
]

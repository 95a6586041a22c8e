"""An emulated CANN: the real torch_npu wheel, and aclnn calls, on a machine without an NPU.

The libraries that torch_npu needs are built here (gcc, once, cached) and loaded before it. Its
code runs unchanged down to the C functions of CANN; operators compute on the CPU. What that
proves is that a program makes the calls it should make, with legal arguments, and that its data
flow is right. It proves nothing about the kernels of a real NPU, their speed or their numerics.

API::

    from ascend_attn_ops import emulator

    npu = emulator.activate("A3")          # build or find the libraries, load, import torch_npu
    with npu.record() as seen:
        ...                                # torch code on device="npu", or aclnn calls by ctypes
    seen.operators                         # ["aclnnMatmul", ...] in order
    seen.calls[0].described()              # {"self": "float16[2, 3]", ...}
    seen.counters.device_to_host_copies    # counters of the runtime in this span
    npu.live                               # handles and allocations that exist now

    emulator.current()                     # the active emulator, also below `emulator run`
    emulator.unavailable_reason()          # why it cannot work here, or None
    emulator.kernel("aclnnX", arguments="self -> out")   # decorator: add an operator
    emulator.provide_cann_ops_transformer()    # a stand-in of the package, on no public registry

Who calls aclnn without torch_npu: ``activate(..., import_torch_npu=False)``, then load
``libascendcl.so`` and ``libopapi.so`` by name with ctypes, as on a machine with CANN.
Command line: ``python -m ascend_attn_ops.emulator --help``.
"""

from types import ModuleType

from .abi import AclnnError
from .builder import Build, build
from .dispatch import implemented, kernel
from .errors import (
    AlreadyActiveError,
    BuildError,
    EmulatorError,
    EmulatorOptionError,
    EmulatorUnavailableError,
)
from .record import Call, Counters, Recording, TensorArgument
from .requirements import unavailable_reason
from .runtime import Emulator, activate, current
from .soc import emulated_profile


def provide_cann_ops_transformer() -> ModuleType:
    """Make ``cann_ops_transformer.ops`` importable in this process; again is harmless.

    The stand-in registers the torch operators of the real package, with its schemas, and serves
    flash_attn and flash_attn_metadata on the emulated device.

    Raises:
        EmulatorError: No emulator is active, or the real package is imported already.
    """
    from . import ops_transformer  # imports torch operators, which a process may not need

    return ops_transformer.provide()


__all__ = [
    "AclnnError",
    "AlreadyActiveError",
    "Build",
    "BuildError",
    "Call",
    "Counters",
    "Emulator",
    "EmulatorError",
    "EmulatorOptionError",
    "EmulatorUnavailableError",
    "Recording",
    "TensorArgument",
    "activate",
    "build",
    "current",
    "emulated_profile",
    "implemented",
    "kernel",
    "provide_cann_ops_transformer",
    "unavailable_reason",
]

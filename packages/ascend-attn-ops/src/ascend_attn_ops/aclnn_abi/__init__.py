"""The C interface of aclnn operators as data: dtype and format numbers, codes, signatures.

An aclnn operator ``aclnnX`` is two C functions::

    int aclnnXGetWorkspaceSize(<arguments>, uint64_t *workspaceSize, aclOpExecutor **executor);
    int aclnnX(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream s);

``signatures.toml`` holds the arguments of the first, in order. Both who calls the functions and
the emulator, which implements them, read it here. Standard library only.
"""

from .signatures import (
    CTYPES,
    ROLES,
    Parameter,
    Signature,
    SignatureError,
    UnknownSignatureError,
    VendorDtype,
    codes,
    dtype_number,
    dtypes,
    formats,
    known_signatures,
    signature,
    vendor_dtypes,
)

__all__ = [
    "CTYPES",
    "ROLES",
    "Parameter",
    "Signature",
    "SignatureError",
    "UnknownSignatureError",
    "VendorDtype",
    "codes",
    "dtype_number",
    "dtypes",
    "formats",
    "known_signatures",
    "signature",
    "vendor_dtypes",
]

"""What can go wrong in a direct call of CANN: one class per situation."""

from __future__ import annotations

from ...aclnn_abi import codes
from ...refusals import AttentionOperatorError

NULL_POINTER, INVALID, TILING, OUT_OF_MEMORY = 161001, 161002, 561002, (207001, 200000)


class CannError(AttentionOperatorError, RuntimeError):
    """A C function of CANN returned a code.

    Attributes:
        code: The code, e.g. 161002.
        symbol: The function, e.g. ``aclnnSparseFlashAttentionGetWorkspaceSize``.
        detail: What ``aclGetRecentErrMsg`` said, or an empty text.
    """

    def __init__(self, code: int, symbol: str, detail: str = "") -> None:
        self.code = code
        self.symbol = symbol
        self.detail = detail
        meaning = codes().get(code, "code without a known meaning")
        super().__init__(f"{symbol} returned {code}: {meaning}{f'; {detail}' if detail else ''}")


class NullPointerError(CannError):
    """161001: a required tensor, output or pointer is null."""


class InvalidArgumentError(CannError):
    """161002: the dtype or format of an argument is none that the operator takes."""


class TilingError(CannError):
    """561002: layouts, modes, shapes or their combination break a rule of the operator.

    CANN checks these while it plans the call (tiling), not with dtypes and formats, and so it
    returns this code for, say, an unknown layout.
    """


class OutOfDeviceMemoryError(CannError):
    """207001 or 200000: the device, or the host's pinned memory, has no room."""


class DirectCallError(AttentionOperatorError, RuntimeError):
    """A direct call that is refused here, before CANN would run into undefined behaviour."""


class HandleError(DirectCallError):
    """A handle such as an aclTensor could not be created; CANN gives no code for that.

    Attributes:
        symbol: The function, e.g. ``aclCreateTensor``.
        detail: What ``aclGetRecentErrMsg`` said, or an empty text.
    """

    def __init__(self, symbol: str, detail: str) -> None:
        self.symbol = symbol
        self.detail = detail
        super().__init__(f"{symbol} made no handle{f'; {detail}' if detail else ''}")


class ShortWorkspaceError(DirectCallError):
    """A workspace is smaller than the first stage asked for."""

    def __init__(self, operator: str, given: int, needed: int) -> None:
        self.operator, self.given, self.needed = operator, given, needed
        super().__init__(f"{operator}: workspace of {given} bytes, needed: {needed}")


class ExecutorReusedError(DirectCallError):
    """A prepared call that has run, or was closed, is to run again."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        super().__init__(
            f"{operator}: its executor has served its call; prepare() makes a new one for each"
        )


class ClosedError(DirectCallError):
    """Something is used after it was closed."""

    def __init__(self, thing: str) -> None:
        super().__init__(f"{thing} is closed; its device memory is free")


class MissingOperatorError(DirectCallError):
    """No library of this CANN has the operator.

    Attributes:
        operator: e.g. ``aclnnFlashAttn``.
    """

    def __init__(self, operator: str, libraries: list[str]) -> None:
        self.operator = operator
        super().__init__(
            f"{operator} is in none of {', '.join(libraries)}: this CANN is older than the "
            "operator, or its operator package is not installed"
        )


class ArrayError(AttentionOperatorError, TypeError):
    """A value cannot be described as a tensor, or is no legal argument of a call."""


_CLASSES: dict[int, type[CannError]] = {
    NULL_POINTER: NullPointerError,
    INVALID: InvalidArgumentError,
    TILING: TilingError,
    **dict.fromkeys(OUT_OF_MEMORY, OutOfDeviceMemoryError),
}


def error_for(code: int, symbol: str, detail: str) -> CannError:
    """The error of a return code; :class:`CannError` itself where no class is more exact."""
    return _CLASSES.get(code, CannError)(code, symbol, detail)

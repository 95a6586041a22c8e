"""Reading ``abi.toml`` and ``signatures.toml``."""

from __future__ import annotations

import ctypes
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

CTYPES: Mapping[str, Any] = {
    "tensor": ctypes.c_void_p,
    "tensors": ctypes.c_void_p,
    "scalar": ctypes.c_void_p,
    "scalars": ctypes.c_void_p,
    "ints": ctypes.c_void_p,
    "floats": ctypes.c_void_p,
    "bools": ctypes.c_void_p,
    "int": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "int8": ctypes.c_int8,
    "uint64": ctypes.c_uint64,
    "dtype": ctypes.c_int32,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
    "str": ctypes.c_char_p,
}
ROLES = ("input", "mutated", "output")

_PARAMETER = re.compile(r"(?:(?P<kind>\w+) )?(?P<name>\w+)(?P<optional>\?)?(?P<mutated>!)?")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class SignatureError(ValueError):
    """A signature text cannot be read."""


class UnknownSignatureError(KeyError):
    """No signature of this operator is recorded."""

    def __str__(self) -> str:
        return str(self.args[0])


class Parameter(NamedTuple):
    """One argument of an operator's first stage.

    Attributes:
        name: Vendor's name in snake case, e.g. ``sparse_indices`` for ``sparseIndices``.
        kind: Key of ``CTYPES``.
        optional: Whether a null pointer is legal.
        role: ``input``, ``mutated`` (read and written) or ``output``.
    """

    name: str
    kind: str
    optional: bool
    role: str


class Signature(NamedTuple):
    """Arguments of ``<operator>GetWorkspaceSize`` before its two results."""

    operator: str
    parameters: tuple[Parameter, ...]

    @property
    def argument_types(self) -> list[Any]:
        """ctypes of the arguments, without workspace size and executor."""
        return [CTYPES[parameter.kind] for parameter in self.parameters]

    @property
    def written(self) -> tuple[Parameter, ...]:
        """Parameters that the operator writes, in order."""
        return tuple(parameter for parameter in self.parameters if parameter.role != "input")


def parse(operator: str, text: str) -> Signature:
    """Read a signature such as ``"self, other, scalar alpha -> out"``.

    A parameter is ``[kind] name[?][!]``: the kind is tensor unless stated, ``?`` marks a pointer
    that may be null, ``!`` a tensor that is read and written. Tensors after ``->`` are outputs,
    behind which some operators have a number.

    Raises:
        SignatureError: The text has another form.
    """
    inputs, arrow, outputs = text.partition("->")
    parameters = [_parameter(operator, part, "input") for part in _parts(inputs)]
    if arrow:
        parameters += [_parameter(operator, part, "output") for part in _parts(outputs)]
    return Signature(operator, tuple(parameters))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parameter(operator: str, text: str, role: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    kind = "tensor" if match is None else match["kind"] or "tensor"
    if match is None or kind not in CTYPES:
        raise SignatureError(f"{operator}: cannot read {text!r}; kinds: {', '.join(CTYPES)}")
    name = snake_case(match["name"])
    role = role if kind in ("tensor", "tensors") else "input"
    return Parameter(name, kind, bool(match["optional"]), "mutated" if match["mutated"] else role)


def snake_case(name: str) -> str:
    """A vendor's name such as ``sparseIndices`` as ``sparse_indices``."""
    return _WORD_START.sub("_", name).lower()


@cache
def _data(name: str) -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath(name).read_text("utf-8"))


@cache
def known_signatures() -> frozenset[str]:
    """Operators whose signature is recorded."""
    return frozenset(_data("signatures.toml")["operators"])


@cache
def signature(operator: str) -> Signature:
    """The recorded signature of an operator such as ``aclnnSparseFlashAttention``.

    Raises:
        UnknownSignatureError: None is recorded.
    """
    text = _data("signatures.toml")["operators"].get(operator)
    if text is None:
        raise UnknownSignatureError(f"no signature of {operator} is recorded in signatures.toml")
    return parse(operator, text)


@cache
def dtypes() -> Mapping[int, str]:
    """aclDataType number -> torch dtype name, for the types that torch has."""
    return {number: name for name, number in _data("abi.toml")["dtypes"].items()}


def dtype_number(name: str) -> int:
    """aclDataType of a torch dtype name such as ``"bfloat16"``.

    Raises:
        KeyError: CANN has no such type.
    """
    return int(_data("abi.toml")["dtypes"][name])


class VendorDtype(NamedTuple):
    """A type of CANN that torch lacks.

    Attributes:
        name: CANN's name in lower case.
        number: aclDataType.
        stored_as: torch dtype of the tensors that hold its bytes.
        torch_npu: torch_npu's number, for arguments such as ``key_dtype``.
    """

    name: str
    number: int
    stored_as: str
    torch_npu: int


@cache
def vendor_dtypes() -> Mapping[int, VendorDtype]:
    """aclDataType number -> the type, for those that torch lacks."""
    entries = _data("abi.toml")["vendor_dtypes"]
    return {entry["number"]: VendorDtype(name, **entry) for name, entry in entries.items()}


@cache
def formats() -> Mapping[int, str]:
    """aclFormat number -> name."""
    return {number: name for name, number in _data("abi.toml")["formats"].items()}


@cache
def codes() -> Mapping[int, str]:
    """Return codes of the runtime and of aclnn operators -> what they mean."""
    return {int(code): text for code, text in _data("abi.toml")["codes"].items()}

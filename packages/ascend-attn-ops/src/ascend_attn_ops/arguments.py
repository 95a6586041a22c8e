"""Argument records: one frozen attrs class per operator, the single definition of its signature.

The torch schema, the fingerprint for cached checks, the reading of JSON cases and the printed
description all come from the record's fields, so they cannot drift apart.
"""

from __future__ import annotations

import operator as py_operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

import attrs
import torch

from .refusals import ArgumentFormatError

T = TypeVar("T")

IntList = tuple[int, ...]
TensorList = tuple[torch.Tensor, ...]

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _as_tuple(value: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value)


def mutated(**kwargs: Any) -> Any:
    """Field of a tensor that the operator writes in place."""
    return attrs.field(metadata={"mutated": True}, **kwargs)


def int_list(**kwargs: Any) -> Any:
    """Field of a host integer list; any sequence is taken, a tuple is kept."""
    return attrs.field(converter=_as_tuple, **kwargs)


def tensor_list(**kwargs: Any) -> Any:
    """Field of a list of tensors; any sequence is taken, a tuple is kept."""
    return attrs.field(converter=_as_tuple, **kwargs)


def _list_as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def tensor_or_list(**kwargs: Any) -> Any:
    """Field of a tensor for which aclnn, but not torch, also takes a tensor list.

    :func:`from_data` reads a JSON list as a tuple of tensors, so that the contract can judge it.
    """
    return attrs.field(converter=_list_as_tuple, metadata={"tensor_list": True}, **kwargs)


def given_outputs(**kwargs: Any) -> Any:
    """Field of the caller's output tensors: ``out`` of the vendor's ``.out`` overload.

    It is not part of the operator's own schema; the contract judges shapes and dtypes.
    """
    return attrs.field(converter=_as_tuple, metadata={"outputs": True}, **kwargs)


@typing.dataclass_transform(
    frozen_default=True,
    eq_default=False,
    field_specifiers=(
        attrs.field,
        mutated,
        int_list,
        tensor_list,
        tensor_or_list,
        given_outputs,
    ),
)
def arguments_record(cls: type[T]) -> type[T]:
    """Class decorator: a frozen record compared by identity (tensors have no truth value)."""
    return attrs.frozen(eq=False, slots=True)(cls)


@attrs.frozen
class Parameter:
    """One argument of an operator.

    Attributes:
        name: CANN's parameter name.
        kind: ``tensor``, ``tensors``, ``int``, ``float``, ``bool``, ``str``, ``ints``.
        optional: Whether None is a legal value.
        default: Default, or ``attrs.NOTHING`` where the argument is required.
        keyword_only: Whether it must be passed by name.
        mutated: Whether the operator writes it in place.
        tensor_list: Whether aclnn also takes a list of tensors.
        outputs: Whether it is the ``out`` of the ``.out`` overload, not in the schema itself.
    """

    name: str
    kind: str
    optional: bool
    default: Any
    keyword_only: bool
    mutated: bool = False
    tensor_list: bool = False
    outputs: bool = False

    @property
    def required(self) -> bool:
        """Whether the argument has no default."""
        return self.default is attrs.NOTHING


_KINDS: dict[Any, str] = {
    torch.Tensor: "tensor",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    IntList: "ints",
    TensorList: "tensors",
}
_TORCH_TYPES = {
    "tensor": "Tensor",
    "tensors": "Tensor[]",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "ints": "SymInt[]",
}


def parameters(record: Any) -> tuple[Parameter, ...]:
    """The parameters of a record, in signature order."""
    return _parameters(record)


@cache
def _parameters(record: Any) -> tuple[Parameter, ...]:
    hints = typing.get_type_hints(record)
    return tuple(_parameter(field, hints[field.name]) for field in attrs.fields(record))


def _parameter(field: attrs.Attribute[Any], hint: Any) -> Parameter:
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        (hint,) = (entry for entry in get_args(hint) if entry is not type(None))
    return Parameter(
        name=field.name,
        kind=_KINDS[hint],
        optional=optional,
        default=field.default,
        keyword_only=field.kw_only,
        mutated=bool(field.metadata.get("mutated")),
        tensor_list=bool(field.metadata.get("tensor_list")),
        outputs=bool(field.metadata.get("outputs")),
    )


def torch_schema(record: type, returns: str) -> str:
    """Signature of the operator in torch's schema language, without its name."""
    letters = iter("abcdefgh")
    parts: list[str] = []
    star = False
    for parameter in parameters(record):
        if parameter.outputs:
            continue
        if parameter.keyword_only and not star:
            parts.append("*")
            star = True
        kind = _TORCH_TYPES[parameter.kind]
        if parameter.mutated:
            kind += f"({next(letters)}!)"
        text = f"{kind}{'?' if parameter.optional else ''} {parameter.name}"
        if not parameter.required:
            text += f"={_literal(parameter.default)}"
        parts.append(text)
    return f"({', '.join(parts)}) -> {returns}"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@cache
def _fingerprint_plan(
    record: Any,
) -> tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any], tuple[Any, ...]], tuple[str, ...]]:
    tensors = [p.name for p in parameters(record) if p.kind == "tensor"]
    lists = tuple(p.name for p in parameters(record) if p.kind == "tensors")
    scalars = [p.name for p in parameters(record) if p.kind not in ("tensor", "tensors")]
    return _getter(tensors), _getter(scalars), lists


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return py_operator.attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


def fingerprint(args: Any) -> tuple[Any, ...]:
    """Everything that rules may look at, hashable: shapes, dtypes, strides and scalars."""
    tensors, scalars, lists = _fingerprint_plan(args.__class__)
    described: list[Any] = [
        t
        if t is None
        else (t.shape, t.dtype, t.stride(), t.device)
        if t.__class__ is not tuple
        else tuple((e.shape, e.dtype, e.stride(), e.device) for e in t)
        for t in tensors(args)
    ]
    for name in lists:
        described += [(t.shape, t.dtype, t.stride(), t.device) for t in getattr(args, name) or ()]
        described.append(name)
    return (*described, scalars(args))


def without_lengths(fingerprint: tuple[Any, ...]) -> tuple[Any, ...]:
    """A fingerprint with only the number of the integers of each list."""
    *described, scalars = fingerprint
    counts = tuple(len(value) if value.__class__ is tuple else value for value in scalars)
    return (*described, tuple(map(type, scalars)), counts)


def tensors_of(args: Any) -> Iterable[torch.Tensor]:
    """All tensors of a record, lists included."""
    for parameter in parameters(args.__class__):
        value = getattr(args, parameter.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif parameter.kind == "tensors":
            yield from value or ()


_SMALL = 16 << 20  # bytes; key and value caches are larger, and no rule reads their values
_COUNTS = (torch.int32, torch.int64, torch.bool)  # lengths, tables, indices, masks: always read


def on_host(args: T) -> T:
    """The record with copies of the device tensors whose values a rule may read.

    Caches and other large tensors stay where they are: of them rules read shapes only.
    """
    changed: dict[str, Any] = {}
    for parameter in parameters(args.__class__):
        value = getattr(args, parameter.name)
        if isinstance(value, tuple) and any(_lies_on_device(entry) for entry in value):
            changed[parameter.name] = tuple(map(_copy, value))
        elif _lies_on_device(value):
            changed[parameter.name] = _copy(value)
    if not changed:
        return args
    record: Any = args  # mypy does not see that the record decorator is attrs.frozen
    copied: T = attrs.evolve(record, **changed)
    return copied


def _lies_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


def _copy(value: torch.Tensor) -> torch.Tensor:
    small = value.numel() * value.element_size() <= _SMALL
    return value.cpu() if small or value.dtype in _COUNTS else value


def describe(args: Any) -> str:
    """The arguments that differ from their defaults, one line each."""
    lines = []
    for parameter in parameters(args.__class__):
        value = getattr(args, parameter.name)
        if value is None or (parameter.kind != "tensor" and value == parameter.default):
            continue
        lines.append(f"  {parameter.name} = {_show(value)}")
    return "\n".join(lines)


def _show(value: object) -> str:
    if isinstance(value, torch.Tensor):
        strides = "" if value.is_contiguous() else f", strides {tuple(value.stride())}"
        return f"{dtype_name(value.dtype)}{list(value.shape)}{strides}"
    if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        return "[" + ", ".join(_show(entry) for entry in value) + "]"
    if isinstance(value, tuple) and len(value) > 12:
        return f"[{', '.join(map(str, value[:10]))}, ... {len(value)} values]"
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def from_data(record: type[T], data: Mapping[str, Any]) -> T:
    """Build a record from a JSON object of arguments by name.

    A tensor is ``{"shape": [...], "dtype": "bfloat16", "strides": [...]?, "values": [...]?}``
    (on the meta device unless values are given); a scalar or list is itself; an absent name is
    not passed, also when it is required: the contract then refuses it. null is the value None
    of an optional argument, and counts as absent for any other.

    Raises:
        ArgumentFormatError: An unknown name, a bad tensor description, or a value of the wrong
            kind.
    """
    known = {parameter.name: parameter for parameter in parameters(record)}
    unknown = sorted(data.keys() - known.keys())
    if unknown:
        raise ArgumentFormatError(
            f"unknown arguments {', '.join(unknown)}; known: {', '.join(known)}"
        )
    values = {
        name: None if value is None else _from_json(known[name], value)
        for name, value in data.items()
        if value is not None or known[name].optional
    }
    for name, parameter in known.items():
        if parameter.required:
            values.setdefault(name, None)
    return record(**values)


def _from_json(parameter: Parameter, value: Any) -> Any:
    readers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda v: _tensor_or_list(parameter, v),
        "tensors": lambda v: tuple(tensor_from_data(parameter.name, entry) for entry in v),
        "ints": lambda v: tuple(_exact(entry, int) for entry in v),
        "int": lambda v: _exact(v, int),
        "float": lambda v: float(_exact(v, (int, float))),
        "bool": lambda v: _exact(v, bool),
        "str": lambda v: _exact(v, str),
    }
    try:
        return readers[parameter.kind](value)
    except TypeError as error:
        raise ArgumentFormatError(
            f"{parameter.name}: found {value!r}, expected {parameter.kind}"
        ) from error


def _tensor_or_list(parameter: Parameter, value: Any) -> Any:
    if parameter.tensor_list and isinstance(value, list):
        return tuple(tensor_from_data(parameter.name, entry) for entry in value)
    return tensor_from_data(parameter.name, value)


def _exact(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(value)
    return value


def tensor_from_data(name: str, data: Any) -> torch.Tensor:
    """A tensor from its JSON description; see :func:`from_data`."""
    if not isinstance(data, Mapping) or not {"shape", "dtype"} <= data.keys():
        raise ArgumentFormatError(
            f"{name}: a tensor is an object with shape and dtype, found {data!r}"
        )
    unknown = sorted(data.keys() - {"shape", "dtype", "strides", "values"})
    if unknown:
        raise ArgumentFormatError(f"{name}: unknown tensor keys {', '.join(unknown)}")
    dtype = DTYPES.get(str(data["dtype"]))
    if dtype is None:
        raise ArgumentFormatError(f"{name}: unknown dtype {data['dtype']!r}")
    shape = _sizes(name, "shape", data["shape"])
    if data.get("values") is not None:
        return _with_values(name, data["values"], shape, dtype)
    strides = None if data.get("strides") is None else _sizes(name, "strides", data["strides"])
    if strides is not None and len(strides) != len(shape):
        raise ArgumentFormatError(f"{name}: {len(shape)} sizes but {len(strides)} strides")
    return _without_values(name, shape, strides, dtype)


def _sizes(name: str, what: str, value: Any) -> IntList:
    legal = isinstance(value, Sequence) and not isinstance(value, str)
    if not legal or not all(type(entry) is int and entry >= 0 for entry in value):
        raise ArgumentFormatError(
            f"{name}: {what} must be a list of integers >= 0, found {value!r}"
        )
    return tuple(value)


def _without_values(
    name: str, shape: IntList, strides: IntList | None, dtype: torch.dtype
) -> torch.Tensor:
    try:
        if strides is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as error:  # torch counts bytes in 64 bits
        where = "" if strides is None else f" with strides {list(strides)}"
        raise ArgumentFormatError(
            f"{name}: shape {list(shape)}{where} is larger than any tensor"
        ) from error


def _with_values(name: str, values: Any, shape: IntList, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.tensor(values, dtype=dtype).reshape(shape)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentFormatError(f"{name}: values do not fill shape {list(shape)}") from error

"""Does the installed vllm-ascend have the interface that the overlay base needs?"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata, resources
from typing import Any

import attrs


@attrs.frozen
class VllmAscend:
    """An installed vllm-ascend.

    Attributes:
        version: of its distribution.
        misfits: what its platform class lacks, one sentence each; None: not looked at.
    """

    version: str
    misfits: tuple[str, ...] | None = None

    def judged(self) -> VllmAscend:
        """The same, with its platform class looked at; this imports vllm-ascend."""
        return attrs.evolve(self, misfits=tuple(installed_misfits()))


@cache
def needs() -> Mapping[str, Any]:
    """The names and signatures that the overlay relies on, from `vllm_ascend.toml`."""
    text = resources.files(__package__).joinpath("vllm_ascend.toml").read_text("utf-8")
    return tomllib.loads(text)


def installed_vllm_ascend() -> VllmAscend | None:
    """The vllm-ascend of this environment, None without one; it is not imported."""
    for name in needs()["distribution_names"]:
        try:
            return VllmAscend(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_misfits() -> list[str]:
    """What the platform class of the installed vllm-ascend lacks; empty when it fits."""
    module, name = needs()["module"], needs()["platform_class"]
    try:
        found = getattr(import_module(module), name)
    except ImportError as error:
        return [f"{module} cannot be imported: {error}"]
    except AttributeError:
        return [f"{module} has no {name}"]
    return misfits_of(found)


def misfits_of(platform: type) -> list[str]:
    """What a platform class lacks of the needed interface, one sentence each.

    Args:
        platform: the class; a method fits when it is one of the class (`classmethod`) and takes
            the parameters that vLLM passes by name.
    """
    found = []
    for name, wanted in needs()["attributes"].items():
        value = getattr(platform, name, None)
        if value != wanted:
            found.append(f"{platform.__name__}.{name}: found {value!r}; allowed: {wanted!r}")
    for name, parameters in needs()["methods"].items():
        found += _method_misfits(platform, name, parameters)
    return found


def _method_misfits(platform: type, name: str, parameters: list[str]) -> list[str]:
    said = f"{platform.__name__}.{name}"
    method = getattr(platform, name, None)
    if method is None:
        return [f"{said} is missing"]
    if getattr(method, "__self__", None) is not platform:
        return [f"{said} is no classmethod"]
    signature = inspect.signature(method)
    try:
        signature.bind(**dict.fromkeys(parameters))
    except TypeError as error:
        return [f"{said}{signature} does not take ({', '.join(parameters)}): {error}"]
    return []

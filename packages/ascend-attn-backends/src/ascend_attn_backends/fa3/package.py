"""What is known of flash-attn-npu, and its function; nothing imports it before a call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import torch

from ascend_attn_ops import ProviderUnavailableError


@cache
def facts() -> Mapping[str, Any]:
    """The contents of ``package.toml``."""
    text = resources.files(__package__).joinpath("package.toml").read_text("utf-8")
    return tomllib.loads(text)


def missing_package() -> str | None:
    """Why the package cannot be used here, or None. Imports nothing."""
    if _installed_module() is not None:
        return None
    return f"package {facts()['distribution']} is not installed: no module {_module_names()}"


def flash_attn_with_kvcache() -> Callable[..., torch.Tensor]:
    """The function of the first module that is installed; the module is imported here.

    Raises:
        ProviderUnavailableError: No module is installed, its import fails (it probes the device),
            or it has no such function.
    """
    name = _installed_module()
    if name is None:
        raise ProviderUnavailableError(f"{missing_package()}; {facts()['install']}")
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise ProviderUnavailableError(
            f"{name} is installed and cannot be imported: {error}; it needs CANN, torch_npu and "
            "an Ascend device that it was built for"
        ) from error
    function: Callable[..., torch.Tensor] | None = getattr(module, facts()["function"], None)
    if function is None:
        raise ProviderUnavailableError(
            f"{name} has no {facts()['function']}; {facts()['distribution']} 0.4 has it "
            f"({facts()['source']})"
        )
    return function


def _installed_module() -> str | None:
    for entry in facts()["module"]:
        name: str = entry["name"]
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            return name
    return None


def _module_names() -> str:
    return " or ".join(entry["name"] for entry in facts()["module"])

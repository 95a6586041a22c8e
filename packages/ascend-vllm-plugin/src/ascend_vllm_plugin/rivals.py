"""Other platform plugins beside ours: vLLM runs with one and stops when two want it.

vLLM's own message names the two and not the way out; so does nothing that runs before it. We ask
the others ourselves, step back where one of them is active, and say what to set once vLLM runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import metadata

ENTRY_POINT = "ascend_vllm"
"""Our name in vLLM's groups of plugins; vllm-ascend's is `ascend`, and vLLM keeps one of a name."""

PLATFORM_GROUP = "vllm.platform_plugins"
ALLOW_LIST = "VLLM_PLUGINS"
"""vLLM's variable with the names of the plugins, of all groups, that it may load."""

_GROUPS = "vllm."


def other_platform_plugins() -> tuple[metadata.EntryPoint, ...]:
    """Platform plugins of others that are installed."""
    found = metadata.entry_points(group=PLATFORM_GROUP)
    return tuple(entry for entry in found if not ours(entry))


def ours(entry: metadata.EntryPoint) -> bool:
    """Whether an entry point belongs to this package."""
    return entry.value.startswith("ascend_vllm_plugin")


def allowed(name: str) -> bool:
    """Whether `VLLM_PLUGINS` lets vLLM load a plugin; unset it lets it load all."""
    names = os.environ.get(ALLOW_LIST)
    return names is None or name in names.split(",")


def active_rivals() -> tuple[metadata.EntryPoint, ...]:
    """Platform plugins of others that would give vLLM a platform here."""
    return tuple(
        entry for entry in other_platform_plugins() if allowed(entry.name) and _wants_vllm(entry)
    )


def _wants_vllm(entry: metadata.EntryPoint) -> bool:
    try:
        return entry.load()() is not None
    # As vLLM, which asks again and logs it: a plugin that fails has no platform to offer.
    except Exception:  # noqa: BLE001
        return False


def described(entries: Iterable[metadata.EntryPoint]) -> list[str]:
    """Name and function of each."""
    return [f"{entry.name} ({entry.value})" for entry in entries]


def allow_list_without(rivals: Iterable[metadata.EntryPoint]) -> str:
    """A value of `VLLM_PLUGINS` that keeps every installed plugin except these."""
    unwanted = {entry.name for entry in rivals}
    names = {
        entry.name
        for distribution in metadata.distributions()
        for entry in distribution.entry_points
        if entry.group.startswith(_GROUPS) and allowed(entry.name)
    }
    return ",".join(sorted((names | {ENTRY_POINT}) - unwanted))

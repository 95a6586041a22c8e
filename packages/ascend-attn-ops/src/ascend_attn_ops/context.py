"""What a call is judged for and by whom: profile, provider and sanitizer of the current context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from ascend_hwprofile import HardwareProfile, profile_for, profile_from_environment

_PROFILE: ContextVar[HardwareProfile | None] = ContextVar("ascend_attn_profile", default=None)
_PROVIDER: ContextVar[str | None] = ContextVar("ascend_attn_provider", default=None)
_SANITIZE: ContextVar[bool | None] = ContextVar("ascend_attn_sanitize", default=None)

PROVIDER_VARIABLE = "ASCEND_ATTN_PROVIDER"

_SWITCH = {"": False, "0": False, "1": True}


@contextmanager
def use_profile(profile: HardwareProfile | str) -> Iterator[HardwareProfile]:
    """Judge every operator call in this context for ``profile`` (or a name of it)."""
    chosen = profile_for(profile) if isinstance(profile, str) else profile
    token = _PROFILE.set(chosen)
    try:
        yield chosen
    finally:
        _PROFILE.reset(token)


@contextmanager
def use_provider(name: str) -> Iterator[None]:
    """Run every operator call in this context by this provider, or fail saying why not.

    Args:
        name: Provider, or several in the order in which they are tried: ``"cpu,reference"``.
    """
    token = _PROVIDER.set(name)
    try:
        yield
    finally:
        _PROVIDER.reset(token)


@contextmanager
def sanitize(enabled: bool = True) -> Iterator[None]:
    """Also check tensor values in this context (see ``ASCEND_ATTN_SANITIZE``)."""
    token = _SANITIZE.set(enabled)
    try:
        yield
    finally:
        _SANITIZE.reset(token)


def current_profile() -> HardwareProfile | None:
    """Profile of the context, else of ``ASCEND_HWPROFILE``, else None.

    Raises:
        ascend_hwprofile.HwProfileError: ``ASCEND_HWPROFILE`` names no known profile.
    """
    profile = _PROFILE.get()
    if profile is not None:
        return profile
    name = os.environ.get("ASCEND_HWPROFILE", "")
    return _profile_from_environment(name) if name else None


@lru_cache(maxsize=8)
def _profile_from_environment(_text: str) -> HardwareProfile | None:
    """What the variable stands for; its text is the key of the cache."""
    return profile_from_environment()


def current_provider() -> str | None:
    """Provider, or several with commas, of the context or ``ASCEND_ATTN_PROVIDER``, else None."""
    return _PROVIDER.get() or os.environ.get(PROVIDER_VARIABLE) or None


def context_choices() -> tuple[HardwareProfile | None, str | None, bool | None]:
    """Profile, provider and sanitizer as the context has them; None where nothing was chosen."""
    return _PROFILE.get(), _PROVIDER.get(), _SANITIZE.get()


def sanitizing() -> bool:
    """Whether tensor values are to be checked.

    Raises:
        ValueError: ``ASCEND_ATTN_SANITIZE`` is neither 0 nor 1.
    """
    chosen = _SANITIZE.get()
    if chosen is not None:
        return chosen
    text = os.environ.get("ASCEND_ATTN_SANITIZE", "")
    if text not in _SWITCH:
        raise ValueError(f"ASCEND_ATTN_SANITIZE: found {text!r}, allowed: 0 or 1")
    return _SWITCH[text]

"""The gate before the table: which draft layers the draft_flash backend takes, term by term."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import attrs

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from .request import BackendRequest

ANY = ["*"]
_HALF = ("float16", "bfloat16")


@attrs.frozen(kw_only=True)
class GateTerm:
    """One term of the gate and how a request stands to it.

    Attributes:
        rule: ``draft_flash.<term>``.
        kind: ``"precondition"``, ``"condition"``, ``"exclusion"`` or ``"limit"``.
        title: What must hold, for people.
        parameter: Fact that decides.
        found: Its value.
        allowed: What the term takes in the mode of the request.
        source: Where the term comes from.
        state: ``"holds"``; ``"relaxed"`` when only the wide gate takes it; ``"broken"``.
    """

    rule: str
    kind: str
    title: str
    parameter: str
    found: str
    allowed: str
    source: str
    state: str

    @property
    def broken(self) -> bool:
        """Whether the term refuses the request."""
        return self.state == "broken"

    def refusal(self) -> Refusal:
        """The term as a reason: why it is broken, or what the strict gate would say."""
        return Refusal(self.rule, self.parameter, self.found, self.allowed, self.source)


def judge_draft_gate(request: BackendRequest, profile: HardwareProfile) -> tuple[GateTerm, ...]:
    """Every term of the gate for a request, in the order of ``draft_gate.toml``.

    The preconditions, the seven conditions and the five exclusions of the strict gate are those of
    the upstream change; ``draft_flash_attn="wide"`` also takes the V2 runner, DFlash drafts of the
    first version and any target. A relaxed term shows what the strict gate allows.

    Args:
        request: The layer; its ``draft_flash_attn`` is the mode of the gate.
        profile: Product that it runs on.
    """
    return tuple(_judge(term, request, profile) for term in _terms())


def _judge(term: Mapping[str, Any], request: BackendRequest, profile: HardwareProfile) -> GateTerm:
    if "values" in term:
        found, state = _by_value(term, request)
        allowed = _options(term["values"])
        if state == "broken" and request.draft_flash_attn == "wide":
            allowed = _options(term.get("wide", term["values"]))
    else:
        problem, found, allowed = _PREDICATES[term["id"]](request, profile)
        state = "broken" if problem else "holds"
    return GateTerm(
        rule=f"draft_flash.{term['id']}",
        kind=term["kind"],
        title=term["title"],
        parameter=term["parameter"],
        found=found,
        allowed=allowed,
        source=term["source"],
        state=state,
    )


def _by_value(term: Mapping[str, Any], request: BackendRequest) -> tuple[str, str]:
    value, strict = getattr(request, term["parameter"]), term["values"]
    wide = term.get("wide", strict) if request.draft_flash_attn == "wide" else strict
    if value in strict or (not strict and value is None):
        state = "holds"
    else:
        state = "relaxed" if wide == ANY or value in wide else "broken"
    return str(value), state


def _options(values: list[object]) -> str:
    return " or ".join(map(str, values)) or "None"


def _architecture(request: BackendRequest, profile: HardwareProfile) -> tuple[bool, str, str]:
    flags = (request.use_mla, request.use_sparse, request.use_compress)
    return any(flags), ", ".join(map(str, flags)), "False, False, False"


def _device_lengths(request: BackendRequest, profile: HardwareProfile) -> tuple[bool, str, str]:
    why_not = profile.why_not(Capability.DEVICE_LENGTH_FLASH_ATTN)
    allowed = "a product with DEVICE_LENGTH_FLASH_ATTN"
    return why_not is not None, why_not or f"{profile.soc_name} has it", allowed


def _dtype(request: BackendRequest, profile: HardwareProfile) -> tuple[bool, str, str]:
    same = request.kv_cache_dtype in ("auto", request.dtype_name)
    broken = request.dtype_name not in _HALF or not same
    allowed = "float16 or bfloat16, with kv_cache_dtype auto or the same"
    return broken, f"{request.dtype_name}, {request.kv_cache_dtype}", allowed


_Predicate = Callable[[BackendRequest, HardwareProfile], tuple[bool, str, str]]
_PREDICATES: Mapping[str, _Predicate] = {
    "architecture": _architecture,
    "device_length_flash_attn": _device_lengths,
    "dtype": _dtype,
}
"""Terms that one value does not decide: (broken, found, allowed)."""


@cache
def _terms() -> tuple[Mapping[str, Any], ...]:
    text = resources.files(__package__).joinpath("draft_gate.toml").read_text("utf-8")
    return tuple(tomllib.loads(text)["term"])

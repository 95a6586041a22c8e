"""From a name, a family or a runtime value to a profile."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ascend_hwprofile import catalog
from ascend_hwprofile.errors import UnknownSocError, UnsupportedSocError
from ascend_hwprofile.profile import HardwareProfile
from ascend_hwprofile.records import DtypeSupport, Figure, OperatorSupport
from ascend_hwprofile.soc import SocId, find_entry, known_socs, parse_soc_name
from ascend_hwprofile.words import Capability, Confidence, Family

ENVIRONMENT_VARIABLE = "ASCEND_HWPROFILE"

# A slice shares these with the whole chip in a way that no source read describes.
_NOT_OF_A_SLICE = ("vector_cores", "ai_cpus", "memory_bytes", "l2_bytes", "memory_bandwidth_gbps")

# What holds for a product that an operator has no verdict on.
_SILENT: Mapping[str, Any] = {
    "reason": "the documents read say nothing about this product",
    "confidence": "unverified",
}


def profile_for(soc: str | Family | int | SocId) -> HardwareProfile:
    """Return the profile of a SoC.

    Args:
        soc: a SoC name (see :func:`~ascend_hwprofile.parse_soc_name`), a family or its name (then
            the family's default SoC, from the data), a runtime value as torch_npu's
            ``get_soc_version()`` returns it, as a number or its digits, or a parsed name.

    Returns:
        The profile; the same object for the same SoC. Value 260 stands for every Ascend950 and
        gives the profile of ``Ascend950``, whose core counts are not known.

    Raises:
        UnknownSocError: nothing known has this name or value.
        UnsupportedSocError: the SoC is recognised and refused, with the explanation.
    """
    if isinstance(soc, SocId):
        return _profile(soc.soc_name)
    if isinstance(soc, str):
        return _profile_of_text(soc)
    if type(soc) is int:
        return _profile_of_value(soc)
    raise UnknownSocError(soc, "expected a SoC name, a family or a runtime value")


def profile_from_environment() -> HardwareProfile | None:
    """Return the profile that the variable ``ASCEND_HWPROFILE`` asks for, None if it is not set.

    Raises:
        UnknownSocError: the variable holds something unknown; the message names the variable.
        UnsupportedSocError: it names a refused SoC.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not text.strip():
        return None
    try:
        return profile_for(text)
    except UnknownSocError as error:
        reason = f"environment variable {ENVIRONMENT_VARIABLE}: {error.reason}"
        raise UnknownSocError(text, reason, error.nearest) from error
    except UnsupportedSocError as error:
        reason = f"environment variable {ENVIRONMENT_VARIABLE}: {error.reason}"
        raise UnsupportedSocError(error.soc_name, reason) from error


def known_profiles() -> tuple[HardwareProfile, ...]:
    """Return the profile of every supported SoC of the data."""
    return tuple(profile_for(soc) for soc in known_socs() if soc.refusal is None)


def operator_names() -> tuple[str, ...]:
    """Return the operators of the product support table."""
    return tuple(catalog.operator_table())


@functools.cache
def _profile_of_text(text: str) -> HardwareProfile:
    wanted = text.strip().lower()
    for family in Family:
        if wanted == family.value.lower():
            return _profile(catalog.family_table(family).default_soc)
    if wanted.isdecimal():  # no name is a number
        return _profile_of_value(int(wanted))
    return _profile(parse_soc_name(text).soc_name)


@functools.cache
def _profile_of_value(value: int) -> HardwareProfile:
    values: set[int] = set()
    for family in map(catalog.family_table, Family):
        if family.shared_soc is not None and family.shared_runtime_value == value:
            return _profile(family.shared_soc)
        for entry in family.entries:
            if entry.runtime_value == value:
                return _profile(entry.soc_name)
            if entry.runtime_value is not None:
                values.add(entry.runtime_value)
    known = _ranges(sorted(values))
    raise UnknownSocError(value, f"no SoC has this runtime value; known: {known}")


def _ranges(values: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


@functools.cache
def _profile(soc_name: str) -> HardwareProfile:
    soc, entry = parse_soc_name(soc_name), find_entry(soc_name)
    if soc.refusal is not None or entry.family is None:
        raise UnsupportedSocError(soc.soc_name, soc.refusal or "it belongs to no known family")
    family = catalog.family_table(entry.family)
    figures = _figures(soc, entry, family)
    dtypes = {**family.dtypes(), **entry.dtypes()}
    operators = _operators(soc, family)
    missing = _missing(family, dtypes, operators)
    whole = functools.partial(_whole, figures)
    return HardwareProfile(
        family=family.family,
        soc_name=soc.soc_name,
        product=soc.product,
        runtime_value=soc.runtime_value,
        toolchain_core=family.toolchain_core,
        die_pair=family.die_pair,
        virtual_slices=tuple(entry.row.get("virtual_slices", family.virtual_slices)),
        note=entry.note,
        npu_arch=whole("npu_arch"),
        cube_cores=whole("cube_cores"),
        vector_cores=whole("vector_cores"),
        clock_mhz=whole("clock_mhz"),
        memory_bytes=whole("memory_bytes"),
        l2_bytes=whole("l2_bytes"),
        dtypes=frozenset(name for name, dtype in dtypes.items() if dtype.supported),
        capabilities=frozenset(Capability) - frozenset(missing),
        figures=figures,
        dtype_support=dtypes,
        operators=operators,
        missing=missing,
    )


def _whole(figures: Mapping[str, Figure], name: str) -> int | None:
    return int(figures[name].value) if name in figures else None


def _figures(soc: SocId, entry: catalog.SocEntry, family: catalog.FamilyTable) -> dict[str, Figure]:
    figures = {**family.figures(), **entry.figures()}
    if soc.slice_cores is None:
        return figures
    kept = {name: figure for name, figure in figures.items() if name not in _NOT_OF_A_SLICE}
    kept["cube_cores"] = Figure(
        soc.slice_cores,
        catalog.source_titles()["va"],
        Confidence.UNVERIFIED,
        "the number in the name of a slice is taken for its count of AI cores",
    )
    return kept


def _operators(soc: SocId, family: catalog.FamilyTable) -> dict[str, OperatorSupport]:
    products = (soc.product,) if soc.product else family.products
    return {name: _operator(name, row, products) for name, row in catalog.operator_table().items()}


def _operator(name: str, row: Mapping[str, Any], products: tuple[str, ...]) -> OperatorSupport:
    verdicts = [_verdict(name, row, product) for product in products]
    first = verdicts[0]
    if all(verdict.supported == first.supported for verdict in verdicts):
        return first
    said = ", ".join(
        f"{product} {_word(verdict.supported)}"
        for product, verdict in zip(products, verdicts, strict=True)
    )
    reason = f"the name of the SoC does not tell the product, and the products differ: {said}"
    return OperatorSupport(name, None, reason, first.source, Confidence.UNVERIFIED, first.limits)


def _verdict(name: str, row: Mapping[str, Any], product: str) -> OperatorSupport:
    stated = (one for one in row["verdicts"] if product in one["products"])
    verdict = next(stated, _SILENT)
    return OperatorSupport(
        name,
        verdict.get("supported"),
        verdict.get("reason") or verdict.get("note", ""),
        catalog.source_titles()[verdict.get("source", row["source"])],
        Confidence(verdict.get("confidence", row["confidence"])),
        row.get("limits", ""),
    )


def _word(supported: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[supported]


def _missing(
    family: catalog.FamilyTable,
    dtypes: Mapping[str, DtypeSupport],
    operators: Mapping[str, OperatorSupport],
) -> dict[Capability, str]:
    missing: dict[Capability, str] = {}
    for value, row in catalog.capability_table().items():
        reasons = [
            *_operator_reasons(row, operators),
            *_dtype_reasons(row, dtypes, family),
            *_feature_reasons(value, row, family),
        ]
        if reasons:
            missing[Capability(value)] = "; ".join(reasons)
    return missing


def _operator_reasons(
    row: Mapping[str, Any], operators: Mapping[str, OperatorSupport]
) -> list[str]:
    supports = [operators[name] for name in row.get("operators", ())]
    return [
        f"operator {one.name} is {'not supported' if one.supported is False else 'not known'}: "
        f"{one.reason} [{one.source}, {one.confidence}]"
        for one in supports
        if not one.supported
    ]


def _dtype_reasons(
    row: Mapping[str, Any], dtypes: Mapping[str, DtypeSupport], family: catalog.FamilyTable
) -> list[str]:
    supports = [dtypes[name] for name in row.get("dtypes", ())]
    arch = family.table["family"]["figures"]["npu_arch"]["value"]
    return [
        f"the cube unit of architecture {arch} does not compute {one.name}"
        f"{f' ({one.note})' if one.note else ''} [{one.source}, {one.confidence}]"
        for one in supports
        if not one.supported
    ]


def _feature_reasons(value: str, row: Mapping[str, Any], family: catalog.FamilyTable) -> list[str]:
    if not row.get("feature", False):
        return []
    feature = family.features()[value]
    if feature.supported:
        return []
    return [f"{feature.reason} [{feature.source}, {feature.confidence}]"]

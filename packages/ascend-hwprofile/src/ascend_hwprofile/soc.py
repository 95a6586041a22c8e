"""Names of SoCs: parsing, aliases, slices, and the nearest known names of what is unknown."""

from __future__ import annotations

import functools
import re

import attrs

from ascend_hwprofile import catalog
from ascend_hwprofile.errors import UnknownSocError
from ascend_hwprofile.words import Family

_PREFIX = "ascend"
_SLICE = r"(?P<base>.+)vir(?P<cores>[0-9]{2})"
_LONGEST_NAME = 64


@attrs.frozen
class SocId:
    """What a SoC name says.

    ``family`` is None for a name that is known to belong to none. ``bin`` is the part after the
    family's stem (``B4-1``, ``9391``, ``9581X``). ``product`` is the column of the product tables,
    None where the name does not say (``Ascend950`` without PR or DT). ``slice_cores`` is the number
    of AI cores of a virtual slice. ``in_data`` is False for a bin that only follows the naming
    pattern. ``refusal`` says why the SoC is not supported, None if it is.
    """

    soc_name: str
    family: Family | None
    bin: str
    product: str | None = None
    runtime_value: int | None = None
    slice_cores: int | None = None
    pre_release: bool = False
    in_data: bool = True
    refusal: str | None = None

    def __str__(self) -> str:
        return self.soc_name


def name_key(text: str) -> str:
    """Return the form in which names are compared: lower case, no ``Ascend``, ``-`` as ``_``."""
    key = text.strip().lower().replace("-", "_")
    return key.removeprefix(_PREFIX).lstrip(" _") if key.startswith(_PREFIX) else key


def parse_soc_name(text: str) -> SocId:
    """Identify a SoC by its name.

    Args:
        text: a name as ACL, torch_npu, npu-smi or a build script prints it, such as
            ``Ascend910B4-1``, ``ascend310p3vir04`` or ``950DT_9581X``. Case, surrounding blanks and
            the prefix ``Ascend`` do not matter; ``-`` and ``_`` are the same.

    Returns:
        The identified SoC. A first generation card is identified too: its ``refusal`` is set.

    Raises:
        UnknownSocError: the text names no SoC; the error holds a reason and the nearest names.
    """
    return _identify(text)[0]


def find_entry(text: str) -> catalog.SocEntry:
    """Return the data entry that ``text`` names, made up from the family for an open name.

    Raises:
        UnknownSocError: the text names no SoC.
    """
    return _identify(text)[1]


def known_socs() -> tuple[SocId, ...]:
    """Return every SoC name of the data, refused ones included."""
    return tuple(_soc_id(entry) for group in catalog.entry_groups() for entry in group)


def _identify(text: object) -> tuple[SocId, catalog.SocEntry]:
    if not isinstance(text, str):
        raise UnknownSocError(text, "a SoC name must be text")
    _refuse_unreadable(text)
    key = name_key(text)
    entry = _find(key) or _open_entry(key)
    if entry is not None:
        return _soc_id(entry), entry
    _refuse_labels(text, key)
    sliced = re.fullmatch(_SLICE, key)
    if sliced and (base := _find(sliced["base"])):
        return _slice_id(text, base, int(sliced["cores"])), base
    raise UnknownSocError(text, _unknown_reason(key), _nearest(key))


def _refuse_unreadable(text: str) -> None:
    if not text.strip():
        raise UnknownSocError(text, "the name is empty")
    if len(text) > _LONGEST_NAME or not text.isascii():
        raise UnknownSocError(text, f"a name is ASCII text of at most {_LONGEST_NAME} characters")


def _refuse_labels(text: str, key: str) -> None:
    for label in catalog.labels():
        if key == name_key(label["text"]):
            raise UnknownSocError(text, label["reason"], label["nearest"])


def _unknown_reason(key: str) -> str:
    for family in Family:
        if key == family.value.lower():
            return f"{family.value} is a family, not a SoC; profile_for() takes families too"
    return "no SoC in the data has this name and no family's naming pattern fits"


def _nearest(key: str) -> tuple[str, ...]:
    # Only needed on the way to an error, and slow to import.
    import difflib

    names = {name_key(soc.soc_name): soc.soc_name for soc in known_socs()}
    return tuple(names[found] for found in difflib.get_close_matches(key, names, cutoff=0.5))


def _find(key: str) -> catalog.SocEntry | None:
    for group in catalog.entry_groups():
        for entry in group:
            if key in _keys(entry):
                return entry
    return None


@functools.cache
def _keys(entry: catalog.SocEntry) -> frozenset[str]:
    return frozenset(map(name_key, (entry.soc_name, *entry.aliases)))


def _open_entry(key: str) -> catalog.SocEntry | None:
    for table in map(catalog.family_table, Family):
        for row in table.open_names:
            match = re.fullmatch(row["pattern"], key)
            if match:
                return catalog.SocEntry(
                    soc_name=row["canonical"] + match["bin"],
                    family=table.family,
                    product=row.get("product"),
                    runtime_value=table.shared_runtime_value,
                    pre_release=row.get("pre_release", False),
                    in_data=False,
                    note="this bin is not in the data; only what holds for its family is known",
                )
    return None


def _bin(entry: catalog.SocEntry) -> str:
    for stem in catalog.family_table(entry.family).stems if entry.family else ():
        if entry.soc_name.startswith(stem):
            return entry.soc_name.removeprefix(stem)
    return entry.soc_name.removeprefix("Ascend")


def _soc_id(entry: catalog.SocEntry) -> SocId:
    return SocId(
        soc_name=entry.soc_name,
        family=entry.family,
        bin=_bin(entry),
        product=entry.product,
        runtime_value=entry.runtime_value,
        pre_release=entry.pre_release,
        in_data=entry.in_data,
        refusal=entry.refusal,
    )


def _slice_id(text: str, base: catalog.SocEntry, cores: int) -> SocId:
    if cores not in base.slices:
        allowed = ", ".join(f"vir{count:02d}" for count in base.slices) or "none"
        reason = f"{base.soc_name} has no slice vir{cores:02d}; slices known by name: {allowed}"
        raise UnknownSocError(text, reason, (base.soc_name,))
    whole = _soc_id(base)
    name = f"{base.soc_name}vir{cores:02d}"
    return attrs.evolve(whole, soc_name=name, bin=f"{whole.bin}vir{cores:02d}", slice_cores=cores)

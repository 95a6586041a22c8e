"""The order of an operator's C arguments, as the header of the installed CANN declares it.

A call by ctypes with another order than the library's is undefined behaviour. Where no document
states the order, the header beside the library is the only witness.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...aclnn_abi import Signature
from ...aclnn_abi.signatures import snake_case
from .libraries import header_folders

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_NAME = re.compile(r"(\w+)\s*(?:\[[^\]]*\])?\s*$")
_SUFFIXES = ("_optional", "_out", "_ref")  # of pointers that may be null, outputs, changed inputs


def unconfirmed_order(form: Signature) -> str | None:
    """Why the recorded order of an operator's arguments may not be used here, or None.

    Args:
        form: The recorded signature.
    """
    name = f"{snake_case(form.operator)}.h"
    found = [path for folder in header_folders() if (path := folder / name).is_file()]
    if not found:
        return (
            f"the C order of the arguments of {form.operator} is in no document, and no {name} of "
            "this CANN confirms the recorded one"
        )
    declared = declared_names(found[0], form.operator)
    recorded = [parameter.name for parameter in form.parameters]
    if [_plain(one) for one in declared] == [_plain(one) for one in recorded]:
        return None
    return (
        f"{found[0]} declares {form.operator} with ({', '.join(declared) or 'nothing'}); "
        f"recorded: ({', '.join(recorded)})"
    )


def declared_names(header: Path, operator: str) -> list[str]:
    """Names of the first stage's arguments in snake case, without workspace size and executor.

    Returns:
        An empty list where the header does not declare the operator.
    """
    text = _COMMENT.sub(" ", header.read_text(encoding="utf-8", errors="replace"))
    declaration = re.search(rf"{operator}GetWorkspaceSize\s*\(([^)]*)\)", text)
    if declaration is None:
        return []
    parts = (_NAME.search(part.strip()) for part in declaration[1].split(","))
    return [snake_case(match[1]) for match in parts if match is not None][:-2]


def _plain(name: str) -> str:
    """A name without what only some headers append, and without the boundaries of its words."""
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name.replace("_", "")

"""Operator x product x provider, from the contracts and the profiles; also the docs table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_hwprofile import profile_for

from .registry import all_operators

PRODUCTS = ("A2", "A3", "A5", "310P")
PROVIDERS = ("reference", "cpu", "torch_npu", "cann_ops_transformer", "aclnn")
MARKS = {True: "yes", False: "no", None: "?"}


def matrix() -> list[dict[str, Any]]:
    """One row per operator.

    Each row holds ``operator``, ``products`` (product -> {supported, reason, source}; supported
    is None where the documents are silent), ``providers`` (implemented ones) and ``rules`` (count).
    """
    return [
        {
            "operator": op.name,
            "products": {product: _support(product, op.name) for product in PRODUCTS},
            "providers": [name for name in PROVIDERS if name in op.providers],
            "rules": len(op.contract.rules),
        }
        for op in all_operators()
    ]


def _support(product: str, operator: str) -> Mapping[str, Any]:
    support = profile_for(product).operator(operator)
    return {
        "supported": support.supported,
        "reason": support.reason,
        "source": support.source,
    }


def markdown() -> str:
    """The matrix as a Markdown table with the meaning of its marks."""
    head = ["operator", *PRODUCTS, *PROVIDERS, "rules"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in matrix():
        products = [MARKS[row["products"][product]["supported"]] for product in PRODUCTS]
        providers = ["yes" if name in row["providers"] else "-" for name in PROVIDERS]
        cells = [f"`{row['operator']}`", *products, *providers, str(row["rules"])]
        lines.append(f"| {' | '.join(cells)} |")
    legend = (
        "Products: yes = documented, no = documented as missing, ? = the documents are silent. "
        "Providers: which implementations this package has."
    )
    return "\n".join([*lines, "", legend, ""])

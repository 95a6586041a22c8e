"""Argument checks of emulated operators: the executable contracts of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import registry
from ..arguments import parameters
from ..selection import check as check_contract
from .abi import INVALID, AclnnError


def contract_check(
    operator: str, arguments: Callable[[Any], Mapping[str, Any]] = vars
) -> Callable[[str, Any], None]:
    """A check that asks the contract of ``operator`` for the emulated SoC.

    Args:
        operator: Name in this package, e.g. ``sparse_flash_attention``.
        arguments: Turns the aclnn arguments into those of the contract; names that the contract
            does not know, such as outputs, are left out.
    """

    def check(name: str, given: Any) -> None:
        from .runtime import current

        contract = registry.operator_named(operator)
        known = {parameter.name for parameter in parameters(contract.record)}
        values = {key: value for key, value in arguments(given).items() if key in known}
        for key, kind in given.vendor_dtypes.items():
            if f"{key}_dtype" in known:
                values[f"{key}_dtype"] = kind.torch_npu
        refusals = check_contract(contract, contract.record(**values), current().profile)
        if refusals:
            code = next((r.cann_code for r in refusals if r.cann_code is not None), INVALID)
            raise AclnnError(code, "; ".join(map(str, refusals)))

    return check

"""The profile: immutable facts and capabilities of one SoC."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ascend_hwprofile.errors import (
    HwProfileError,
    UnknownFigureError,
    UnknownOperatorError,
    quoted,
)
from ascend_hwprofile.records import DtypeSupport, Figure, OperatorSupport
from ascend_hwprofile.words import Capability, Family

_CUBE_M = 16
_CUBE_N = 16
_MULTIPLY_ADD = 2


@attrs.frozen
class HardwareProfile:
    """Facts and capabilities of one SoC.

    A figure that no source states is None; :meth:`require` turns that into an error. Sizes are in
    bytes, clocks in MHz. ``dtypes`` are what the cube unit computes. ``product`` is the column of
    the vendor's product tables, None where the SoC name does not tell. ``virtual_slices`` are the
    AI core counts that the platform_config files offer for virtual devices.
    """

    family: Family
    soc_name: str
    product: str | None
    runtime_value: int | None
    toolchain_core: str
    die_pair: bool
    virtual_slices: tuple[int, ...]
    note: str
    npu_arch: int | None
    cube_cores: int | None
    vector_cores: int | None
    clock_mhz: int | None
    memory_bytes: int | None
    l2_bytes: int | None
    dtypes: frozenset[str]
    capabilities: frozenset[Capability]
    figures: Mapping[str, Figure] = attrs.field(eq=False, repr=False)
    dtype_support: Mapping[str, DtypeSupport] = attrs.field(eq=False, repr=False)
    operators: Mapping[str, OperatorSupport] = attrs.field(eq=False, repr=False)
    missing: Mapping[Capability, str] = attrs.field(eq=False, repr=False)

    def supports(self, capability: Capability) -> bool:
        """Return whether the capability is known to hold.

        Raises:
            HwProfileError: ``capability`` is not a capability.
        """
        return capability in self.capabilities or not self._lacks(capability)

    def why_not(self, capability: Capability) -> str | None:
        """Return the reason why the capability does not hold, None if it does.

        Raises:
            HwProfileError: ``capability`` is not a capability.
        """
        if self.supports(capability):
            return None
        known = Capability(capability)
        return f"{self.soc_name} ({self.family}) has no {known.name}: {self.missing[known]}"

    def operator(self, name: str) -> OperatorSupport:
        """Return what the product tables say about a CANN attention operator.

        Raises:
            UnknownOperatorError: the tables do not list ``name``; holds the nearest names.
        """
        support = self.operators.get(name)
        if support is None:
            import difflib

            raise UnknownOperatorError(name, difflib.get_close_matches(str(name), self.operators))
        return support

    def figure(self, name: str) -> Figure | None:
        """Return a figure with its source, None where no source states it."""
        return self.figures.get(name)

    def require(self, name: str) -> int:
        """Return a figure as a whole number.

        Raises:
            UnknownFigureError: no source states the figure for this SoC.
        """
        found = self.figures.get(name)
        if found is None:
            reason = self.note or "no source read states it"
            raise UnknownFigureError(self.soc_name, name, reason)
        return int(found.value)

    def peak_tflops(self, dtype: str) -> float | None:
        """Return the dense peak rate of the cube units, in 10^12 operations per second.

        The rate is ``cube_cores x 16 x 16 x K x 2 x clock``: each cycle a cube unit multiplies a
        16 x K by a K x 16 block, and a multiply-add counts as two. K is 16 for 16-bit types, 32 for
        8-bit and 64 for 4-bit ones (the DtypeMKN entries of the platform_config files). The formula
        gives 245.76 for float16 on Ascend910B4, the value a public profiler test asserts.

        Returns:
            None where the core count, the clock or the K of ``dtype`` is not known.

        Raises:
            HwProfileError: the cube unit does not compute ``dtype``.
        """
        support = self.dtype_support.get(dtype)
        if support is None or not support.supported:
            raise HwProfileError(
                f"{quoted(dtype)} has no cube rate on {self.soc_name}; "
                f"allowed: {', '.join(sorted(self.dtypes))}"
            )
        if self.cube_cores is None or self.clock_mhz is None or support.cube_k is None:
            return None
        per_cycle = self.cube_cores * _CUBE_M * _CUBE_N * support.cube_k * _MULTIPLY_ADD
        return per_cycle * self.clock_mhz / 1e6

    def _lacks(self, capability: Capability) -> bool:
        # Only reached when the set does not hold the value: tell a missing ability from a typo.
        if capability in self.missing:
            return True
        raise HwProfileError(
            f"unknown capability {quoted(capability)}; allowed: {', '.join(Capability)}"
        )

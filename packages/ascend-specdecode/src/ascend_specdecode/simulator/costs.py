"""What a call costs on a profile: the memory-bound model of decoding.

A decoding step reads every weight and the cached keys and values of every sequence once, and
multiplies every weight with every token. The slower of the two is its time:

    T(n, c) = h + max((W + S c) / (e B), 2 P n / (e F))

n tokens in the call, c cached tokens over its sequences; W bytes of weights, P parameters, S bytes
of keys and values for a token; B memory bandwidth and F peak rate of the profile; e the share of
both that is reached; h the host's share. It leaves out the attention arithmetic, communication and
mixtures of experts. Its figures are simulated: good for comparing schedules, no promise of speed.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs

from ascend_hwprofile import HardwareProfile, HwProfileError, profile_for
from ascend_specdecode.arguments import check_number
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.protocols import DraftedSequence

EFFICIENCY: Final = 0.8
"""Share of the peak that is reached: 1456 of 1800 GB/s were measured on A2 (its profile)."""

_BYTES: Final = {"float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3": 1}
_KEY_AND_VALUE: Final = 2
_CACHE_BYTES: Final = 2


@attrs.frozen
class ModelShape:
    """What the cost of a dense model depends on.

    Attributes:
        name: what it is called.
        parameters: weights.
        layers: decoder layers.
        kv_heads: heads of keys and values.
        head_dim: elements of a head.
        source: where the figures are from.
    """

    name: str
    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    source: str

    @property
    def cache_bytes(self) -> int:
        """Bytes of 16-bit keys and values for one token."""
        return _KEY_AND_VALUE * self.layers * self.kv_heads * self.head_dim * _CACHE_BYTES


@functools.cache
def model_shapes() -> Mapping[str, ModelShape]:
    """Return the shapes of the data file, by name."""
    file = importlib.resources.files(__package__) / "data" / "models.toml"
    data = tomllib.loads(file.read_text("utf-8"))
    return {name: ModelShape(name, **row) for name, row in data.items()}


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model by name.

    Raises:
        ArgumentError: no such model in the data file.
    """
    known = model_shapes()
    if name not in known:
        raise ArgumentError("model", repr(name), f"one of {', '.join(known)}")
    return known[name]


@attrs.frozen
class DecodeCost:
    """Seconds of a call of one model on one profile; the formula is the module's.

    Attributes:
        shape: the model.
        bandwidth: bytes per second that are reached.
        rate: operations per second that are reached.
        weight_bytes: bytes of one weight.
        host_seconds: the host's share of every call.
    """

    shape: ModelShape
    bandwidth: float
    rate: float
    weight_bytes: int
    host_seconds: float

    def seconds(self, tokens: int, cached: int) -> float:
        """Return the seconds of a call.

        Args:
            tokens: tokens that it computes, over all sequences.
            cached: tokens whose keys and values it reads, over all sequences.
        """
        weights = self.shape.parameters * self.weight_bytes
        reading = (weights + self.shape.cache_bytes * cached) / self.bandwidth
        computing = 2.0 * self.shape.parameters * tokens / self.rate
        return self.host_seconds + max(reading, computing)

    def score(self, batch: Sequence[DraftedSequence]) -> float:
        """Return the seconds of scoring a batch, for :class:`SimulatedTarget`."""
        ends = [row.sequence.length + len(row.proposal.tokens) for row in batch]
        computed = sum(ends) - sum(row.cached_length for row in batch)
        return self.seconds(computed, sum(ends))

    def draft(self, context: int) -> Callable[[int, int], float]:
        """Return the seconds of drafting k tokens for some sequences, one token after the other.

        Args:
            context: tokens of one sequence, taken as the same for all.
        """
        return lambda k, rows: k * self.seconds(rows, rows * context)


def decode_cost(
    soc: str | HardwareProfile,
    model: str | ModelShape,
    *,
    dtype: str = "bfloat16",
    host_seconds: float = 0.0,
    efficiency: float = EFFICIENCY,
    bandwidth_gbps: float | None = None,
) -> DecodeCost:
    """Return what calls of a model cost on a SoC.

    Args:
        soc: a profile, or the name of a SoC or family.
        model: a shape, or a name of the data file.
        dtype: of the weights.
        host_seconds: the host's share of every call.
        efficiency: share of bandwidth and peak rate that is reached, in (0, 1].
        bandwidth_gbps: memory bandwidth in 10^9 bytes per second, instead of the profile's.

    Raises:
        ArgumentError: an argument is out of range, or the profile states no bandwidth or rate.
        HwProfileError: the SoC is unknown.
    """
    profile = profile_for(soc) if isinstance(soc, str) else soc
    shape = model_shape(model) if isinstance(model, str) else model
    if dtype not in _BYTES:
        raise ArgumentError("dtype", repr(dtype), f"one of {', '.join(_BYTES)}")
    check_number("efficiency", efficiency, "a number above 0 and up to 1", least=1e-6, most=1.0)
    check_number("host_seconds", host_seconds, "seconds >= 0", least=0.0, most=1e3)
    figure = profile.figure("memory_bandwidth_gbps")
    bandwidth = figure.value if bandwidth_gbps is None and figure is not None else bandwidth_gbps
    if bandwidth is None:
        raise ArgumentError(
            "bandwidth_gbps", f"None, and no source states it for {profile.soc_name}", "a number"
        )
    check_number("bandwidth_gbps", bandwidth, "GB/s > 0", least=1e-3, most=1e6)
    peak = _peak(profile, dtype)
    rate, bytes_per_second = efficiency * peak * 1e12, efficiency * bandwidth * 1e9
    return DecodeCost(shape, bytes_per_second, rate, _BYTES[dtype], host_seconds)


def _peak(profile: HardwareProfile, dtype: str) -> float:
    try:
        peak = profile.peak_tflops(dtype)
    except HwProfileError as error:
        raise ArgumentError("dtype", repr(dtype), str(error)) from None
    if peak is None:
        found = f"{profile.soc_name}, whose core count or clock no source states"
        raise ArgumentError("soc", found, "a SoC with a known peak rate")
    return peak

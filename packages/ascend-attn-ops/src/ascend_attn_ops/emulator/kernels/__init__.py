"""CPU functions of the emulated aclnn operators; importing this package registers them.

Attention operators compute in float64, dense and written apart from this package's providers, so
that a provider that is compared through the emulator is compared with something else.
"""

from . import elementwise, indexing, linear, random_numbers, reductions, sparse_flash_attention

__all__ = [
    "elementwise",
    "indexing",
    "linear",
    "random_numbers",
    "reductions",
    "sparse_flash_attention",
]

"""ATB's operators, served at torch's dispatcher.

ATB is a C++ interface: its classes cross the library boundary, so that there is no C function to
emulate. These operators check their contract and compute like the aclnn ones, but nothing below
the dispatcher of torch_npu runs.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import registry
from ..arguments import parameters
from ..selection import check as check_contract
from .kernels.cache_ops import cache_token, shaped
from .record import Call, TensorArgument
from .runtime import current

_CONTRACTS = {
    "_npu_paged_attention": "paged_attention",
    "_npu_reshape_and_cache": "reshape_and_cache",
}


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run an ATB operator on NPU tensors.

    Raises:
        RuntimeError: Its contract refuses the arguments.
    """
    contract = registry.operator_named(_CONTRACTS[name])
    names = [parameter.name for parameter in parameters(contract.record)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    emulator = current()
    refusals = check_contract(
        contract, contract.record(**{k: v for k, v in given.items() if k in names}),
        emulator.profile,
    )  # fmt: skip
    described = {key: _described(value) for key, value in given.items()}
    text = "; ".join(map(str, refusals)) or None
    emulator.tell(Call(f"atb::{name}", described, refused=text))
    if text is not None:
        raise RuntimeError(f"{name}: {text}")
    views = {key: _host_view(value) for key, value in given.items()}
    stream: int = sys.modules["torch_npu"].npu.current_stream().npu_stream
    emulator.submit(f"atb::{name}", lambda: _FUNCTIONS[name](views), stream)


def _host_view(value: Any) -> Any:
    """Device memory is memory of this process: the same elements as a CPU tensor."""
    if not isinstance(value, torch.Tensor) or value.device.type != "npu" or not value.numel():
        return value
    storage = value.untyped_storage()
    raw = torch.frombuffer(
        (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
    )
    whole = raw[: storage.nbytes() // value.itemsize * value.itemsize].view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _described(value: Any) -> Any:
    return TensorArgument.of(value) if isinstance(value, torch.Tensor) else value


def _reshape_and_cache(a: dict[str, Any]) -> None:
    slots = a["slot_indices"].tolist()
    for cache, rows in ((a["key_cache"], a["key"]), (a["value_cache"], a["value"])):
        for slot, row in zip(slots, rows, strict=True):
            if slot >= 0:
                cache_token(cache, slot, blocked=False).copy_(shaped(row, cache, False))


def _paged_attention(a: dict[str, Any]) -> None:
    """One query row for each request, all keys visible, float64."""
    group = a["num_heads"] // a["num_kv_heads"]
    for row, length in enumerate(a["context_lens"].tolist()):
        keys, values = (
            _request_rows(cache, a["block_table"][row], length).repeat_interleave(group, 1)
            for cache in (a["key_cache"], a["value_cache"])
        )
        scores = torch.einsum("hd,khd->hk", a["query"][row].double(), keys) * a["scale_value"]
        a["out"][row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)


def _request_rows(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    blocks = table[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:length].double()


_FUNCTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "_npu_paged_attention": _paged_attention,
    "_npu_reshape_and_cache": _reshape_and_cache,
}

"""A stand-in for ``cann_ops_transformer``, which is built with CANN and is on no public registry.

:func:`provide` puts a module of that name into the process. Its torch operators have the schemas
that the real package registers (order of arguments, defaults, fake kernels), and on NPU tensors
they call the emulated aclnnFlashAttnMetadata and aclnnFlashAttn, so that a call of the package is
bound against the true schema and checked as CANN would.

Where the real package replaces an explicit None (its dispatcher's defaults), so does this one.
Source of schemas and defaults: ops-transformer attention/flash_attn, torch extension.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

from ..operators._shared.flash_attn import size_of
from ..providers.aclnn import current_runtime
from .errors import EmulatorError
from .runtime import current

NAME = "cann_ops_transformer"
SCHEMAS = (
    "flash_attn_metadata(int num_heads_q, int num_heads_kv, int head_dim, *, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, Tensor? seqused_q=None, "
    "Tensor? seqused_kv=None, int? batch_size=None, int? max_seqlen_q=None, "
    "int? max_seqlen_kv=None, int? mask_mode=None, int? win_left=None, int? win_right=None, "
    "str? layout_q=None, str? layout_kv=None, str? layout_out=None) -> Tensor",
    "flash_attn(Tensor q, Tensor k, Tensor v, Tensor? block_table=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, Tensor? seqused_q=None, "
    "Tensor? seqused_kv=None, Tensor? sinks=None, Tensor? attn_mask=None, "
    "Tensor? metadata=None, float softmax_scale=1.0, int mask_mode=0, int win_left=-1, "
    "int win_right=-1, int max_seqlen_q=-1, int max_seqlen_kv=-1, "
    'str layout_q="BSND", str layout_kv="BSND", str layout_out="BSND", '
    "bool return_softmax_lse=False) -> (Tensor, Tensor)",
)
# What the dispatcher makes of an explicit None; max_seqlen_q it leaves alone.
_DEFAULTS = {
    "batch_size": -1, "max_seqlen_kv": -1, "mask_mode": 1, "win_left": -1, "win_right": -1,
    "layout_q": "BSND", "layout_kv": "BSND", "layout_out": "BSND",
}  # fmt: skip
_RECORD, _ALIGNMENT = 16, 4096
_libraries: list[torch.library.Library] = []


def provide() -> types.ModuleType:
    """Make ``cann_ops_transformer.ops`` importable in this process; again is harmless.

    Raises:
        EmulatorError: No emulator is active, or the real package is imported already.
    """
    current()
    known = sys.modules.get(NAME)
    if known is not None:
        if not _libraries:
            raise EmulatorError(f"{NAME} is imported already, and it is not the stand-in")
        return known
    _register()
    package, ops = types.ModuleType(NAME, __doc__), types.ModuleType(f"{NAME}.ops", __doc__)
    for module in (package, ops):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        setattr(ops, name, getattr(torch.ops.cann_ops_transformer, name))
    package.ops = ops  # type: ignore[attr-defined]
    sys.modules |= {NAME: package, f"{NAME}.ops": ops}
    return package


def _register() -> None:
    library = torch.library.Library(NAME, "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("flash_attn", _flash_attn, "PrivateUse1")
    # Its tensors are all optional, so that no device is found for a call without any.
    library.impl("flash_attn_metadata", _flash_attn_metadata, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAME}::flash_attn", _flash_attn_outputs, lib=library)
    torch.library.register_fake(f"{NAME}::flash_attn_metadata", _fake_metadata, lib=library)
    _libraries.append(library)


def _flash_attn(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _named("flash_attn", args, kwargs)
    out, lse = _flash_attn_outputs(**call)
    if not call["return_softmax_lse"]:
        lse = lse.new_empty(0)
    _call("aclnnFlashAttn", {**call, "attn_out": out, "softmax_lse": lse}, out.device)
    return out, lse


def _flash_attn_metadata(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _named("flash_attn_metadata", args, kwargs)
    settled = {name: call[name] for name in call if call[name] is not None}
    call = {**call, **{name: value for name, value in _DEFAULTS.items() if name not in settled}}
    if call["max_seqlen_q"] is None:
        raise RuntimeError("flash_attn_metadata: max_seqlen_q is None, which nothing replaces")
    metadata = _fake_metadata(**call)
    _call("aclnnFlashAttnMetadata", {**call, "metadata": metadata}, metadata.device)
    return metadata


def _call(operator: str, arguments: dict[str, Any], device: torch.device) -> None:
    """Both stages on torch_npu's stream; the workspace is torch_npu's memory."""
    runtime = current_runtime(device)
    with runtime.prepare(operator, arguments) as prepared:
        size = prepared.workspace_size
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        prepared.execute(workspace.data_ptr(), size)


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults included: torch leaves out those that equal the default."""
    schema = getattr(torch.ops.cann_ops_transformer, name).default._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _flash_attn_outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any,
                        **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Fake kernel: the full lse, whatever the flag says, as the vendor's."""
    call = _named("flash_attn", (q, k, v, *args), kwargs)
    layout, out = call["layout_q"], call["layout_out"]
    sizes = {letter: size_of(q, layout, letter) for letter in layout}
    sizes["D"] = size_of(v, call["layout_kv"], "D")
    lse = [sizes[letter] for letter in ("NT" if layout == "TND" else "BNS")]
    return q.new_empty([sizes[letter] for letter in out]), q.new_empty(lse, dtype=torch.float32)


def _fake_metadata(num_heads_q: int, num_heads_kv: int, head_dim: int, **kwargs: Any
                   ) -> torch.Tensor:  # fmt: skip
    """Fake kernel: the size of a plan; heads and head size of the query do not change it."""
    used, sums = kwargs.get("seqused_q"), kwargs.get("cu_seqlens_q")
    if used is not None:
        requests = used.shape[0]
    elif sums is not None:
        requests = sums.shape[0] - 1
    else:
        requests = kwargs.get("batch_size")
        if requests is None or requests < 0:
            raise ValueError("batch_size must be given where neither seqused_q nor cu_seqlens_q is")
    given = (value for value in kwargs.values() if isinstance(value, torch.Tensor))
    device = next((tensor.device for tensor in given), torch.device("npu"))
    profile = current().profile
    cores = (profile.cube_cores or 0) + (profile.vector_cores or 0)
    words = _RECORD * (1 + cores * requests * num_heads_kv)
    return torch.empty(-(-words // _ALIGNMENT) * _ALIGNMENT, dtype=torch.int32, device=device)

"""A plan together with the arguments that it was made for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import attrs
import torch

from ascend_hwprofile import HardwareProfile

from ...arguments import parameters
from ...context import use_profile
from ...refusals import OpArgumentError, Refusal
from ..flash_attn_metadata.arguments import FlashAttnMetadataArguments
from .arguments import FlashAttnArguments
from .rules import CONTRACT

_SOURCE = "ops-transformer flash_attn: agreement of the two calls is not checked by CANN"
_GEOMETRY = (
    "num_heads_q", "num_heads_kv", "head_dim", "requests", "longest", "windows", "layouts",
)  # fmt: skip
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")


@attrs.frozen(eq=False)
class _Snapshot:
    """A length tensor as it was: values on the host, identity and version on a device.

    Reading a device tensor would make the host wait for it, so a change there shows only as
    another tensor or as a later version of the same one.
    """

    tensor: torch.Tensor
    values: torch.Tensor | None
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> _Snapshot | None:
        if tensor is None:
            return None
        host = tensor.device.type == "cpu"
        return cls(tensor, tensor.detach().clone() if host else None, _version(tensor))

    def difference(self, tensor: torch.Tensor | None) -> str | None:
        """How ``tensor`` differs from what was seen, or None."""
        if tensor is None:
            return "nothing"
        if self.values is not None and tensor.device.type == "cpu":
            same = torch.equal(tensor, self.values)
            return None if same else _shown(tensor)
        if tensor.data_ptr() != self.tensor.data_ptr() or tensor.shape != self.tensor.shape:
            return f"another tensor on {tensor.device}"
        changed = _version(tensor) != self.version
        return "the same tensor, written to since" if changed else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _shown(tensor: torch.Tensor) -> str:
    values = tensor.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


@attrs.frozen(eq=False)
class FlashAttnPlan:
    """A flash_attn plan that knows what it was made for; made by :meth:`build`.

    CANN's tensor stays as it is: what the plan belongs to is kept beside it, because nothing in
    the tensor says so and a plan for other arguments gives wrong results without an error.

    Attributes:
        metadata: (words,) int32, the ``metadata`` argument of flash_attn.
        arguments: Arguments of the flash_attn_metadata call.
    """

    metadata: torch.Tensor
    arguments: FlashAttnMetadataArguments
    _lengths: dict[str, _Snapshot | None] = attrs.field(repr=False)

    @classmethod
    def build(
        cls,
        arguments: FlashAttnMetadataArguments | FlashAttnArguments,
        *,
        profile: HardwareProfile | None = None,
    ) -> FlashAttnPlan:
        """Run flash_attn_metadata and keep what it was asked for.

        Args:
            arguments: Arguments of flash_attn_metadata, or of the flash_attn call itself.
            profile: Hardware to plan for; default: the context's.

        Raises:
            OpArgumentError: flash_attn or flash_attn_metadata refuses the arguments.
        """
        if isinstance(arguments, FlashAttnArguments):
            refusals = CONTRACT.broken(arguments, None, host=True)
            if refusals:
                raise OpArgumentError(CONTRACT.name, refusals)
            arguments = arguments.plan_arguments()
        values = {p.name: getattr(arguments, p.name) for p in parameters(type(arguments))}
        snapshots = {name: _Snapshot.of(values[name]) for name in _LENGTHS}
        with nullcontext() if profile is None else use_profile(profile):
            # Through the dispatcher: tensors without values (meta, fake) get a plan of that kind.
            metadata = torch.ops.ascend_attn.flash_attn_metadata(**values)
        return cls(metadata, arguments, snapshots)

    def fits(self, args: FlashAttnArguments) -> list[Refusal]:
        """Every way in which a flash_attn call differs from what the plan was made for.

        Host lengths are compared by value. Device lengths are not read: they must be the tensors
        the plan was made from, not written to since. ``args.metadata`` may be missing.
        """
        wanted = args.plan_arguments()
        found: list[tuple[str, Any, Any]] = [
            (name, getattr(wanted, name), getattr(self.arguments, name)) for name in _GEOMETRY
        ]
        found.append(("mask_mode", wanted.mask_mode or 0, self.arguments.mask_mode or 0))
        refusals = [_refusal(name, str(new), str(old)) for name, new, old in found if new != old]
        refusals += [r for name in _LENGTHS if (r := self._length_refusal(wanted, name))]
        if args.metadata is not None and args.metadata is not self.metadata:
            refusals.append(_refusal("metadata", "another tensor", "the tensor of this plan"))
        return refusals

    def _length_refusal(self, wanted: FlashAttnMetadataArguments, name: str) -> Refusal | None:
        tensor: torch.Tensor | None = getattr(wanted, name)
        seen = self._lengths[name]
        if seen is None:
            difference = None if tensor is None else _shown_form(tensor)
            return _refusal(name, difference, "nothing") if difference else None
        difference = seen.difference(tensor)
        if difference is None:
            return None
        made_for = "the tensor it was made from" if seen.values is None else _shown(seen.values)
        return _refusal(name, difference, made_for)


def _shown_form(tensor: torch.Tensor) -> str:
    return f"a tensor {list(tensor.shape)}"


def _refusal(name: str, found: str, made_for: str) -> Refusal:
    return Refusal(
        rule=f"{CONTRACT.name}.plan",
        parameter=name,
        found=found,
        allowed=f"{made_for}, as the plan was made for",
        source=_SOURCE,
    )

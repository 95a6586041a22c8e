"""What the latent backend computes once per step, for all layers."""

from __future__ import annotations

import attrs
import torch

from ascend_attn_ops import PartialAttention

from ..standard import AscendMetadata


@attrs.frozen(eq=False, kw_only=True)
class AscendMLAMetadata(AscendMetadata):
    """Metadata of one step; see :class:`AscendMetadata` for the other fields.

    Attributes:
        keyless_tokens: ``[num_tokens]`` bool on the device, the tokens of requests without any key;
            None when there are none. What an operator returns for them is not read: some return a
            finite lse or NaN there.
    """

    keyless_tokens: torch.Tensor | None

    def neutral(self, part: PartialAttention) -> PartialAttention:
        """``part`` with out 0 and lse -inf where a request has no key, by its length alone."""
        if self.keyless_tokens is None:
            return part
        return PartialAttention(
            part.out.masked_fill(self.keyless_tokens[:, None, None], 0.0),
            part.lse.masked_fill(self.keyless_tokens[:, None], float("-inf")),
        )

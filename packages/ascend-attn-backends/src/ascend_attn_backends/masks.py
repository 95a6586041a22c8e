"""Attention masks: the 2048 x 2048 template and the translation of windows into mask modes."""

from __future__ import annotations

import threading

import attrs
import torch

from .errors import InvalidFieldError

TEMPLATE_SIZE = 2048
"""Rows and columns of the template that the compressed mask modes take (op-plugin docs
npu_fused_infer_attention_score, ``atten_mask`` with ``sparse_mode`` 2, 3 and 4)."""

UNBOUNDED_TOKENS = 2147483647
"""The operator's own default of ``pre_tokens`` and ``next_tokens``: no bound."""

NO_MASK, RIGHT_DOWN_CAUSAL, BAND = 0, 3, 4
"""Values of ``sparse_mode`` that this package uses."""


@attrs.frozen
class MaskMode:
    """Mask arguments of one attention call.

    Query i of a request with Lq query tokens and Lkv keys sits at key position i + Lkv - Lq. Mode 3
    lets it see keys up to that position; mode 4 from ``pre_tokens`` before it to ``next_tokens``
    after it, both ends included; mode 0 without a mask every key.

    Attributes:
        sparse_mode: 0, 3 or 4.
        pre_tokens: Keys before the own position that are seen; only mode 4 reads it.
        next_tokens: Keys after the own position that are seen; only mode 4 reads it.
    """

    sparse_mode: int
    pre_tokens: int = UNBOUNDED_TOKENS
    next_tokens: int = UNBOUNDED_TOKENS

    @property
    def needs_template(self) -> bool:
        """Whether the operator wants the 2048 x 2048 template with this mode."""
        return self.sparse_mode != NO_MASK

    @classmethod
    def for_window(cls, sliding_window: int | None, *, causal: bool) -> MaskMode:
        """Mode for a layer's window.

        A window of W is what Hugging Face and vLLM mean by it: W keys, the token's own included, so
        W - 1 keys before it (window 1: a token sees only itself). A layer that is not causal sees
        W - 1 keys on both sides, as those two projects do.

        Args:
            sliding_window: Keys in the window, or None for no window.
            causal: Whether keys after the own position are hidden.

        Raises:
            InvalidFieldError: The window is not a positive number.
        """
        if sliding_window is None:
            return cls(RIGHT_DOWN_CAUSAL) if causal else cls(NO_MASK)
        if sliding_window < 1:
            raise InvalidFieldError("sliding_window", sliding_window, "None, or at least 1 key")
        reach = sliding_window - 1
        return cls(BAND, pre_tokens=reach, next_tokens=0 if causal else reach)


class AttentionMaskBuilder:
    """Builds the mask template once per device; all builders and layers share it."""

    def __init__(self) -> None:
        self._templates: dict[torch.device, torch.Tensor] = {}
        self._lock = threading.Lock()

    def template(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """``[2048, 2048]`` int8, 1 strictly above the diagonal (hidden), else 0.

        Nobody may write to the result: it is shared by every step and layer on ``device``.
        """
        key = torch.device(device)
        with self._lock:
            if key not in self._templates:
                ones = torch.ones((TEMPLATE_SIZE, TEMPLATE_SIZE), dtype=torch.int8, device=key)
                self._templates[key] = torch.triu(ones, diagonal=1)
            return self._templates[key]


SHARED_MASKS = AttentionMaskBuilder()
"""The process-wide mask builder; empty until a builder asks it for a template."""

"""Token ids on their way into a draft: placeholders, the shift by one, reduced vocabularies.

Nothing here reads a value on the host, and nothing changes a tensor that it was given unless the
caller names it as ``out``.
"""

from __future__ import annotations

import attrs
import torch

from .errors import InvalidFieldError


def sanitized_input_ids(
    ids: torch.Tensor, fill: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Token ids that an embedding can look up: placeholders (negative ids) become ``fill``.

    Engines mark tokens that are not known yet, or that were rejected, with -1. A sampler needs
    these marks, an embedding kernel fails on them, so they get two tensors.

    Args:
        ids: ``[num_tokens]`` int32 or int64; never written, unless it is ``out``.
        fill: A legal id; its results are not used.
        out: Buffer of the model's forward, same shape and dtype, written in place.

    Returns:
        ``out``, or a new tensor.

    Raises:
        InvalidFieldError: ``fill`` is negative, or ``out`` has another shape or dtype.
    """
    if fill < 0:
        raise InvalidFieldError("fill", fill, "an id of at least 0")
    return _into(out, torch.where(ids < 0, fill, ids))


def shift_left(
    ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    next_ids: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens of each request moved one place left, and the next token in its last place.

    A draft that follows the target reads token i + 1 beside the hidden state of token i. The moved
    tokens are computed before anything is written, so ``out`` may be ``ids`` itself: moving by
    overlapping slices would clobber tokens that are still to be read.

    Args:
        ids: ``[num_token_rows]`` int32 or int64; never written, unless it is ``out``.
        query_start_loc: ``[num_reqs + 1]`` int32, monotone; tokens after its last entry are padding
            and keep their ids. A request without tokens takes no place.
        next_ids: ``[num_reqs]``, dtype of ``ids``: the token that the target gave after each
            request.
        out: Buffer, same shape and dtype as ``ids``, written in place.

    Returns:
        ``out``, or a new tensor.

    Raises:
        InvalidFieldError: A shape or dtype does not fit.
    """
    wanted = (query_start_loc.shape[0] - 1,)
    if next_ids.dtype != ids.dtype or tuple(next_ids.shape) != wanted:
        raise InvalidFieldError(
            "next_ids", f"{next_ids.dtype} {list(next_ids.shape)}", f"{ids.dtype} {list(wanted)}"
        )
    if not wanted[0] or not ids.shape[0]:
        return _into(out, ids.clone())
    places = torch.arange(ids.shape[0], dtype=query_start_loc.dtype, device=ids.device)
    rows = torch.searchsorted(query_start_loc[1:].contiguous(), places, right=True)
    owned = rows < wanted[0]
    rows = rows.clamp(max=wanted[0] - 1)
    is_last = places + 1 == query_start_loc[1:][rows]
    moved = torch.where(is_last, next_ids[rows], ids.roll(-1))
    return _into(out, torch.where(owned, moved, ids))


def _into(out: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    if out is None:
        return values
    if (out.dtype, out.shape) != (values.dtype, values.shape):
        raise InvalidFieldError(
            "out", f"{out.dtype} {list(out.shape)}", f"{values.dtype} {list(values.shape)}"
        )
    return out.copy_(values)


@attrs.frozen(eq=False)
class DraftVocabulary:
    """The vocabulary of a draft whose head knows only some of the target's tokens.

    Attributes:
        target_ids: ``[draft_size]`` int64, the target's id of each draft id.
        target_size: Tokens of the target.
    """

    target_ids: torch.Tensor
    target_size: int

    @classmethod
    def from_d2t(cls, d2t: torch.Tensor, target_size: int) -> DraftVocabulary:
        """From the ``d2t`` tensor of EAGLE-3 checkpoints: target id minus draft id.

        Args:
            d2t: ``[draft_size]`` integers in host memory.
            target_size: Tokens of the target.

        Raises:
            InvalidFieldError: See :meth:`from_target_ids`.
        """
        return cls.from_target_ids(torch.arange(d2t.shape[0]) + d2t.long(), target_size)

    @classmethod
    def from_target_ids(cls, target_ids: torch.Tensor, target_size: int) -> DraftVocabulary:
        """From the target's id of each draft id.

        Args:
            target_ids: ``[draft_size]`` integers in host memory.
            target_size: Tokens of the target.

        Raises:
            InvalidFieldError: An id is not the target's, or stands for two draft ids.
        """
        ids = target_ids.long()
        outside = ((ids < 0) | (ids >= target_size)).nonzero()
        if outside.numel():
            first = int(outside[0])
            raise InvalidFieldError(
                f"target_ids[{first}]", int(ids[first]), f"0 to {target_size - 1}"
            )
        if ids.unique().numel() != ids.numel():
            raise InvalidFieldError("target_ids", "an id twice", "an id of its own per draft id")
        return cls(ids, target_size)

    @property
    def size(self) -> int:
        """Tokens that the draft knows."""
        return self.target_ids.shape[0]

    def to(self, device: torch.device | str) -> DraftVocabulary:
        """The same with its map on ``device``, where the drafts are; move it once, not per step."""
        return attrs.evolve(self, target_ids=self.target_ids.to(device))

    def check_head(self, weight: torch.Tensor) -> None:
        """Check that a head belongs to this vocabulary.

        A loader that shares the target's head with every draft hands over the wrong one, and
        nearly all drafts are rejected.

        Args:
            weight: ``[rows, hidden]`` of the draft's head.

        Raises:
            InvalidFieldError: It has another number of rows; says so if it is the target's.
        """
        rows = weight.shape[0]
        if rows != self.size:
            whose = " (the target's head)" if rows == self.target_size else ""
            raise InvalidFieldError(
                "head", f"{rows} rows{whose}", f"the {self.size} rows of the draft's own head"
            )

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, same shape; negative placeholders stay as they are.

        Args:
            draft_ids: Any shape, int32 or int64, on the device of the map; see :meth:`to`.
        """
        known = draft_ids.clamp(min=0).long()
        mapped = self.target_ids[known].to(draft_ids.dtype)
        return torch.where(draft_ids < 0, draft_ids, mapped)

    def to_target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary; tokens that the draft does not know have -inf.

        Args:
            logits: ``[..., draft_size]`` on the device of the map; see :meth:`to`.

        Returns:
            ``[..., target_size]``, dtype and device of ``logits``.

        Raises:
            InvalidFieldError: The last dimension is not the draft's vocabulary.
        """
        if logits.shape[-1] != self.size:
            raise InvalidFieldError("logits", list(logits.shape), f"[..., {self.size}]")
        spread = logits.new_full((*logits.shape[:-1], self.target_size), float("-inf"))
        spread[..., self.target_ids] = logits
        return spread

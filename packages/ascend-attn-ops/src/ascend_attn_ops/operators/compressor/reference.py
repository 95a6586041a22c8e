"""The formula, request by request, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

import attrs
import torch

from .._shared.rotary import rms_norm, rotate_half, rotate_interleaved
from .arguments import CompressorArguments as Args

INTERLEAVED = 2


def output_shape(a: Args) -> tuple[int, ...]:
    """Shape of cmp_kv."""
    if a.batched:
        batch, tokens, _ = a.x.shape
        return batch, (tokens + a.cmp_ratio - 1) // a.cmp_ratio, a.head_size
    rows, packed = a.x.shape[0], a.x.shape[0] // a.cmp_ratio + a.batch
    return torch.sym_min(rows, packed), a.head_size


@attrs.frozen
class Chunk:
    """The tokens that a call brings for one request.

    Attributes:
        request: Number of the request.
        row: First row among the flattened tokens.
        length: Number of tokens.
        start: Position of the first.
    """

    request: int
    row: int
    length: int
    start: int

    def groups(self, ratio: int) -> int:
        """Groups that end among the tokens."""
        return (self.start + self.length) // ratio - self.start // ratio


def chunks(a: Args) -> list[Chunk]:
    """One for each request."""
    if a.batched:
        room = a.x.shape[1]
        rows, lengths = [b * room for b in range(a.batch)], [room] * a.batch
    else:
        assert a.cu_seqlens is not None  # noqa: S101 - the contract guarantees it
        rows, lengths = a.cu_seqlens[:-1].tolist(), a.cu_seqlens.diff().tolist()
    lengths = lengths if a.seqused is None else a.seqused.tolist()
    starts = [0] * a.batch if a.start_pos is None else a.start_pos.tolist()
    places = zip(rows, lengths, starts, strict=True)
    return [Chunk(b, row, length, start) for b, (row, length, start) in enumerate(places)]


def run_reference(a: Args) -> tuple[torch.Tensor, ...]:
    """cmp_kv and four empty tensors; updates the states. See the argument record."""
    out = a.x.new_zeros(output_shape(a))
    flat, sin, cos = (t.view(-1, t.shape[-1]) for t in (out, a.rope_sin, a.rope_cos))
    wide = torch.promote_types(a.x.dtype, torch.float32)
    rows = a.x.reshape(-1, a.x.shape[-1]).to(wide)
    packed = 0
    for chunk in chunks(a):
        tokens = rows[chunk.row : chunk.row + chunk.length]
        position = chunk.start + torch.arange(chunk.length)
        kv = tokens @ a.wkv.to(wide).T
        score = tokens @ a.wgate.to(wide).T + a.ape[position % a.cmp_ratio].to(wide)
        count = chunk.groups(a.cmp_ratio)
        first = chunk.request * out.shape[1] if a.batched else packed
        packed += count
        if count:
            keys = _keys(a, chunk, kv, score)
            place = slice(first, first + count)
            flat[place] = _finished(a, keys, sin[place], cos[place]).to(a.x.dtype)
        _keep(a, chunk, kv, score)
    return (out, *(torch.zeros(0) for _ in range(4)))


def _keys(a: Args, chunk: Chunk, kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """(groups, D) weighted sums, before the norm."""
    ratio, count = a.cmp_ratio, chunk.groups(a.cmp_ratio)
    first_group = max(chunk.start // ratio - (a.coff - 1), 0)
    earlier = torch.arange(first_group * ratio, chunk.start)
    stored = ((a.kv_state, a.kv_block_table, kv), (a.score_state, a.score_block_table, score))
    sides = []
    for (state, table, new), nothing in zip(stored, (0.0, float("-inf")), strict=True):
        old = _read(state, table, chunk.request, earlier).to(new)
        tokens = torch.cat([old, new])
        groups = tokens[: len(tokens) // ratio * ratio].view(-1, ratio, a.coff, a.head_size)
        parts = [groups[-count:, :, -1]]
        if a.coff == 2:
            parts.insert(0, _before(groups[:, :, 0], count, nothing))
        sides.append(torch.cat(parts, 1))
    values, scores = sides
    return (scores.softmax(1) * values).sum(1)


def _before(groups: torch.Tensor, count: int, nothing: float) -> torch.Tensor:
    """The groups in front of the last ``count`` ones; ``nothing`` in front of the first."""
    none = torch.full_like(groups[:1], nothing)
    return torch.cat([none, groups[:-1]])[-count:]


def _finished(a: Args, keys: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Norm, then rotation of the last channels."""
    normed = rms_norm(keys, a.norm_weight.to(keys), a.norm_eps)
    plain, rope = normed.split([a.head_size - a.rope_head_dim, a.rope_head_dim], -1)
    rotate = rotate_interleaved if a.rotary_mode == INTERLEAVED else rotate_half
    return torch.cat([plain, rotate(rope, cos.to(keys), sin.to(keys))], -1)


def first_kept(a: Args, chunk: Chunk) -> int:
    """Position from which on tokens are kept: the unfinished group, with overlap the one before."""
    end = chunk.start + chunk.length
    return max((end // a.cmp_ratio - (a.coff - 1)) * a.cmp_ratio, chunk.start)


def _keep(a: Args, chunk: Chunk, kv: torch.Tensor, score: torch.Tensor) -> None:
    position = torch.arange(first_kept(a, chunk), chunk.start + chunk.length)
    new = position - chunk.start
    for state, table, rows in (
        (a.kv_state, a.kv_block_table, kv),
        (a.score_state, a.score_block_table, score),
    ):
        block, offset = _places(state, table, chunk.request, position)
        written = block != 0
        state[block[written], offset[written]] = rows[new[written]].to(state.dtype)


def _read(
    state: torch.Tensor, table: torch.Tensor | None, request: int, position: torch.Tensor
) -> torch.Tensor:
    block, offset = _places(state, table, request, position)
    return state[block, offset]


def _places(
    state: torch.Tensor, table: torch.Tensor | None, request: int, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of each position."""
    assert table is not None  # noqa: S101 - the contract guarantees it
    size = state.shape[1]
    column = torch.div(position, size, rounding_mode="floor")
    return table[request, column].long(), position % size

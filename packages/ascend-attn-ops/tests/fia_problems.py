"""Hypothesis problems of fused_infer_attention_score in any layout, and their float64 answers.

A problem is drawn request by request; the layouts are packed from that, and the answer is computed
on the requests with explicit loops, so that nothing here shares code with the providers.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
BATCHED = ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD",
           "BNSD_NBSD")  # fmt: skip
PACKED = ("TND", "NTD", "NTD_TND", "TND_NTD")


@attrs.frozen(eq=False)
class Requests:
    """What is computed, request by request: query [Lq, N, D], key and value [Lkv, KN, ...]."""

    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]
    hidden: list[torch.Tensor]
    shift: list[torch.Tensor] | None
    sink: torch.Tensor | None

    def answer(self, scale: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(out [Lq, N, VD], lse [Lq, N]) of each request; +inf and 0 for rows without keys."""
        return [self._one(request, scale) for request in range(len(self.query))]

    def _one(self, b: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (t[b].double() for t in (self.query, self.key, self.value))
        out = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
        lse = torch.full(query.shape[:2], math.inf, dtype=torch.float64)
        group = query.shape[1] // key.shape[1]
        for i in range(len(query)):
            seen = [j for j in range(len(key)) if not self.hidden[b][i, j]]
            for head in range(query.shape[1]):
                if not seen:
                    continue
                scores = key[seen, head // group] @ query[i, head] * scale
                if self.shift is not None:
                    scores = scores + self.shift[b][head, i, seen].double()
                weights = (scores - scores.max()).exp()
                total = weights.sum()
                if self.sink is not None:
                    total = total + (self.sink[head].double() - scores.max()).exp()
                out[i, head] = weights @ value[seen, head // group] / total
                lse[i, head] = scores.max() + weights.sum().log()
        return out, lse


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(1, 3))
    lists = st.lists(st.integers(0, 40), min_size=batch, max_size=batch)
    layout = draw(st.sampled_from(BATCHED + PACKED))
    packed = layout in PACKED
    longest = draw(st.sampled_from([1, 2, 6]))
    q_lens = draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))
    forms = ["rows", "BnBsH", "NZ"] + ([] if layout[:3] in ("BSH", "BSN") else ["BnNBsD"])
    form = draw(st.sampled_from(forms))
    size = 16 if form == "NZ" else draw(st.sampled_from([8, 16]))
    simple = form == "rows" and layout in ("BSH", "BSND", "BNSD")
    return {
        "layout": layout,
        "q_lens": q_lens,
        "kv_lens": draw(lists),
        "heads": draw(st.sampled_from([(1, 1), (4, 2), (6, 2), (4, 1)])),
        "size": size,
        "value_size": size if form == "NZ" or draw(st.booleans()) else 24,
        "rope": draw(st.sampled_from([0, 0, 16])),
        "form": form,
        "block": draw(st.sampled_from([16, 32])),
        "mode": draw(st.sampled_from([0, 3, 4] if packed else [0, 1, 2, 3, 4])),
        "mask": not packed and draw(st.sampled_from([None, "one", "each", "large"])),
        "pre": draw(st.integers(0, 30)),
        "next": draw(st.integers(-2, 8)),
        "shift": not packed and draw(st.sampled_from([0, 0, 1, batch])),
        "sink": draw(st.booleans()),
        "padding": draw(st.integers(0, 2)),
        "prefix": draw(st.sampled_from([0, 0, 5])) if simple else 0,
        "list": simple and draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def band(mode: int, lq: int, lkv: int, pre: int, after: int) -> torch.Tensor:
    """bool [lq, lkv]: what the band of a mode hides, element by element."""
    hidden = torch.zeros(lq, lkv, dtype=torch.bool)
    for i in range(lq):
        for j in range(lkv):
            low, high = {
                0: (i - pre, i + after),
                1: (0, lkv),
                2: (0, i),
                3: (0, i + lkv - lq),
                4: (i + lkv - lq - pre, i + lkv - lq + after),
            }[mode]
            hidden[i, j] = not low <= j <= high
    return hidden

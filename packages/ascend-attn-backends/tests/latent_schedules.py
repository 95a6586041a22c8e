"""Schedules of steps for the latent backends: prefill, chunks, decode, verification, mixed."""

from __future__ import annotations

from hypothesis import strategies as st

Chunk = tuple[int, int]
"""Tokens of a request in one step: kept ones, and drafts that are rejected afterwards."""

SCHEDULES: dict[str, list[list[Chunk]]] = {
    "prefill at once": [[(37, 0), (5, 0), (20, 0)]],
    "chunks": [[(16, 0), (5, 0), (7, 0)], [(16, 0), (0, 0), (7, 0)], [(5, 0), (0, 0), (6, 0)]],
    "prefill then decode": [[(35, 0), (3, 0), (18, 0)], *[[(1, 0)] * 3] * 3],
    "prefill then verification": [
        [(29, 0), (1, 0), (12, 0)],
        [(4, 0), (2, 2), (1, 3)],
        [(1, 3), (3, 1), (4, 0)],
    ],
    "mixed": [[(20, 0), (0, 0), (19, 0)], [(16, 0), (1, 0), (1, 0)], [(1, 0), (1, 3), (0, 0)]],
}

CHUNKS = st.one_of(
    st.tuples(st.sampled_from([0, 1, 1, 2, 9, 17, 30]), st.just(0)),
    st.integers(1, 8).flatmap(
        lambda k: st.integers(1, k + 1).map(lambda accepted: (accepted, k + 1 - accepted))
    ),
)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[Chunk]]:
    """A prefill of one to three requests, then up to three steps of any kind."""
    requests = draw(st.integers(1, 3))
    step = st.lists(CHUNKS, min_size=requests, max_size=requests)
    first = [(draw(st.sampled_from([1, 6, 14, 31])), 0) for _ in range(requests)]
    return [first, *draw(st.lists(step, max_size=3))]

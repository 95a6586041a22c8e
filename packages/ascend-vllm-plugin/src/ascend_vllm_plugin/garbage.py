"""When a process of this package collects garbage.

Loading vLLM makes a few hundred thousand objects that stay. Collections while they are made took a
quarter of that time, and vLLM collects several times more before an engine stands.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed() -> Iterator[None]:
    """Collect nothing inside, and afterwards leave alone what is there by then.

    For processes that a command of this package has to itself: whatever was garbage inside stays.
    vLLM does the same with what an engine is made of once it stands.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()

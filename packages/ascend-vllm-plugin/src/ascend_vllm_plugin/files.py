"""Files that others read while this package writes them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, which becomes `path` at the end; a reader sees all of it or nothing.

    Where the body raises, `path` stays as it was. Only this user can open the file.

    Args:
        path: file to make or to replace, in a folder that exists.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

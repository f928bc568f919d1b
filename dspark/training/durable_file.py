"""Small files that a later run depends on: replaced whole or not at all, whatever the disk does."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write, sync, rename, so that `path` holds its old text or the new one. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # gone already when all went well

"""Files that a later run depends on: replaced whole or not at all, whatever the disk does."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write, sync, rename, so that `path` holds its old text or the new one. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # its own, should two processes write the same file
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # gone already when all went well


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, have reached the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

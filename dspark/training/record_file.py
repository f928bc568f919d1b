"""A file of JSON lines that grows while work is done, survives any end of the process, and is in order at last."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from dspark.errors import CheckpointError, ConfigError


class RecordFile(AbstractContextManager["RecordFile"]):
    """Records with an `index`, appended as their items finish. All records of an item stand together.

    `num_records(index)` says how many an item has when whole: the last item of the file may have been cut short.
    """

    def __init__(self, path: Path, num_records: Callable[[int], int]) -> None:
        """Open or make the file, removing what an interrupted run left half-written.

        Raises `ConfigError` for a file that is not of this kind or cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._places, end = _read_places(path, num_records)
            os.truncate(path, end)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be used as output: {error}; choose another file") from error
        self.done = {index for index, _, _ in self._places}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, index: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Add all records of item `index`. Raises `CheckpointError` when the disk does not take them."""
        data = b"".join(json.dumps({"index": index, **record}).encode() + b"\n" for record in records)
        try:
            self._places.append((index, self._file.tell(), len(data)))
            while data:  # a raw file may take a part only
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._unwritable(error) from error
        self.done.add(index)

    def finish(self) -> None:
        """Bring the file onto the disk, in the order of its items. Raises `CheckpointError` when that fails."""
        try:
            os.fsync(self._file.fileno())
            if self._places != sorted(self._places):
                self._sort()
        except OSError as error:
            raise self._unwritable(error) from error

    def records(self) -> Iterator[dict[str, Any]]:
        """Read all records in the order in which they stand."""
        with self.path.open("rb") as file:
            for line in file:
                yield json.loads(line)

    def _sort(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "wb") as ordered, self.path.open("rb") as file:
                for _, offset, size in sorted(self._places):
                    file.seek(offset)
                    ordered.write(file.read(size))
                ordered.flush()
                os.fsync(ordered.fileno())
            os.chmod(name, self.path.stat().st_mode)  # temporary files are private
            os.replace(name, self.path)
        finally:
            Path(name).unlink(missing_ok=True)  # gone already when all went well

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be written: {error}; free space and give the same command again, it goes on"
        )


def _read_places(path: Path, num_records: Callable[[int], int]) -> tuple[list[tuple[int, int, int]], int]:
    """Return (index, offset, size in bytes) of each whole item in the file, and where the last one ends."""
    places: list[tuple[int, int, int]] = []
    offset = num_lines = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # only the last one can lack it
                break
            index = _index_of(line, f"{path}, line {number}")
            if places and places[-1][0] == index:
                places[-1] = (index, places[-1][1], places[-1][2] + len(line))
                num_lines += 1
            else:
                places.append((index, offset, len(line)))
                num_lines = 1
            offset += len(line)
    if places and num_lines < num_records(places[-1][0]):
        offset = places.pop()[1]
    return places, offset


def _index_of(line: bytes, place: str) -> int:
    try:
        index = json.loads(line)["index"]
        if type(index) is int:
            return index
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{place} is not a record of an earlier run (an object with an index); choose another file")

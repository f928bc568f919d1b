"""A file of records loses nothing that is whole, and keeps nothing that is not."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from dspark.errors import CheckpointError, ConfigError
from dspark.training.record_file import RecordFile


def one_each(index: int) -> int:
    return 1


def lines(path: Path) -> list[tuple[int, str]]:
    return [(record["index"], record["x"]) for record in map(json.loads, path.read_text().splitlines())]


def test_records_are_there_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "out.jsonl", one_each) as file:
        file.append(3, [{"x": "c"}])
        assert lines(tmp_path / "out.jsonl") == [(3, "c")]


def test_finish_brings_them_into_the_order_of_the_items(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "out.jsonl", one_each) as file:
        file.append(3, [{"x": "c"}])
        file.append(0, [{"x": "a"}, {"x": "b"}])
        file.append(1, [])
        file.finish()
        assert [record["x"] for record in file.records()] == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_what_is_done_is_known_again(tmp_path: Path) -> None:
    for index in (2, 0):
        with RecordFile(tmp_path / "out.jsonl", one_each) as file:
            file.append(index, [{"x": "a"}])
    with RecordFile(tmp_path / "out.jsonl", one_each) as file:
        assert file.done == {0, 2}
        file.finish()
    assert lines(tmp_path / "out.jsonl") == [(0, "a"), (2, "a")]


@pytest.mark.parametrize("rest", [b'{"index": 1, "x": "hal', b'{"index": 1}', b"\x00\x00"])
def test_a_last_line_that_was_cut_short_is_removed(rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"index": 0, "x": "a"}\n' + rest)
    with RecordFile(path, one_each) as file:
        assert file.done == {0}
        file.append(1, [{"x": "b"}])
    assert lines(path) == [(0, "a"), (1, "b")]


def test_a_last_item_of_too_few_records_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path, lambda _: 2) as file:
        file.append(0, [{"x": "a"}, {"x": "b"}])
        file.append(1, [{"x": "c"}])
    with RecordFile(path, lambda _: 2) as file:
        assert file.done == {0}
    assert lines(path) == [(0, "a"), (0, "b")]


@pytest.mark.parametrize("line", ["prose", "[1]", '{"x": 1}', '{"index": "0"}'])
def test_a_file_of_something_else_is_refused_and_left_alone(line: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"index": 0}}\n{line}\n')
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"out\.jsonl, line 2 is not a record of an earlier run"):
        RecordFile(path, one_each)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as output"):
        RecordFile(tmp_path / "file" / "out.jsonl", one_each)


def test_a_full_disk_is_reported_and_costs_the_record_at_hand_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes five bytes of the second record; after that the file goes on as if these were not there."""
    path = tmp_path / "out.jsonl"

    class FullDisk:
        def tell(self) -> int:
            return 0

        def write(self, data: bytes) -> int:
            if len(data) == len(b'{"index": 1, "x": "b"}\n'):
                return real.write(data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            real.close()

    with RecordFile(path, one_each) as file:
        file.append(0, [{"x": "a"}])
        real = file._file
        monkeypatch.setattr(file, "_file", FullDisk())
        with pytest.raises(CheckpointError, match=r"out\.jsonl cannot be written: .*No space left.*same command"):
            file.append(1, [{"x": "b"}])
    assert path.read_bytes() == b'{"index": 0, "x": "a"}\n{"ind'
    with RecordFile(path, one_each) as file:
        assert file.done == {0}

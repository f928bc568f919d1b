"""The record of a run: what a full disk leaves of it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from dspark.errors import CheckpointError
from dspark.training.regenerate_config import RegenerateConfig
from dspark.training.run_log import add_to_run_record, write_run_record


def test_a_full_disk_leaves_the_record_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RegenerateConfig(output="out.jsonl", self_prompt=1, seed=5)
    write_run_record(tmp_path, config, {"data": "d"}, {"num_prompts": 1}, first_step=0)
    before = (tmp_path / "run.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("dspark.durable_file.os.fsync", full)
        with pytest.raises(CheckpointError, match=r"run\.json cannot be written: .*No space left.*free space"):
            write_run_record(tmp_path, config, {"data": "d"}, {}, first_step=1)
        with pytest.raises(CheckpointError, match=r"run\.json cannot be written"):
            add_to_run_record(tmp_path / "run.json", {"result": 1})
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("run.json", before)]
    add_to_run_record(tmp_path / "run.json", {"result": 1})
    assert json.loads((tmp_path / "run.json").read_text())["result"] == 1

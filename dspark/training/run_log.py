"""What a run tells: a bar on the terminal, `log.jsonl` line by line, `run.json` with all that made it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dspark
from dspark.durable_file import write_durably
from dspark.errors import CheckpointError, ConfigError
from dspark.training.identity import combined

_LOG = "log.jsonl"
_RECORD = "run.json"


class RunSettings(Protocol):
    """What a run record needs of the settings of a run."""

    @property
    def seed(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...


class RunLog(AbstractContextManager["RunLog"]):
    """The log of one run in `folder`; a silent one (`folder` None) belongs to the processes that only compute."""

    def __init__(self, folder: Path | None, *, total_steps: int, first_step: int, show_progress: bool) -> None:
        """Go on after `first_step` steps; lines of steps that a resumed run does again are removed."""
        self._path = None if folder is None else folder / _LOG
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._speaks = show_progress and folder is not None
        self._bar = Progress(*columns, console=self._console, disable=not (self._speaks and self._console.is_terminal))
        self._task = self._bar.add_task("training", total=total_steps, completed=first_step)
        if self._path is not None and self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= first_step]
            _write(self._path, "w", "".join(f"{line}\n" for line in kept))

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, message: str) -> None:
        """Print a line for people."""
        if self._speaks:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a line to the log. Raises `CheckpointError` when the disk does not take it."""
        if self._path is not None:
            _write(self._path, "a", json.dumps(record) + "\n")
            if "loss" in record:
                self._bar.update(
                    self._task, description=f"loss {record['loss']:.3f}, {record['blocks_per_s']:.0f} blocks/s"
                )

    def step_done(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def meter(self, label: str) -> Callable[[int, int], None]:
        """Return a function (done, total) that shows a task that comes before the steps."""
        task = self._bar.add_task(label, total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)


def write_run_record(
    folder: Path,
    config: RunSettings,
    identity: Mapping[str, str],
    facts: Mapping[str, Any],
    *,
    first_step: int,  # steps (or records) done before
    name: str = _RECORD,
) -> None:
    """Write `folder`/`name`: commands, seed, code, versions, data and settings.

    A resumed run adds its command to those before it. Raises `ConfigError` when the folder cannot be written.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(path.read_text(encoding="utf-8"))["commands"] if path.exists() else []
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} cannot be used as output: {error}; choose another folder") from error
    record = {
        "commands": [*earlier, {"argv": sys.argv, "git_sha": git_sha(), "first_step": first_step}],
        "seed": config.seed,
        "versions": {
            "dspark": dspark.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "data_hash": combined(identity),
        "identity": dict(identity),
        "settings": config.to_json(),
        **facts,
    }
    _replace(path, record)


def add_to_run_record(path: Path, facts: Mapping[str, Any]) -> None:
    """Add what is known only at the end to a run record. Raises `CheckpointError` when the disk does not take it."""
    _replace(path, json.loads(path.read_text(encoding="utf-8")) | facts)


def git_sha() -> str | None:
    """Return the commit of the code that runs, or None outside a checkout."""
    command = ["git", "-C", str(Path(dspark.__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return sys.maxsize  # a line cut short when the disk was full


def _replace(path: Path, record: Mapping[str, Any]) -> None:
    try:
        write_durably(path, json.dumps(record, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(path: Path, mode: str, text: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be written: {error}; free space and resume")

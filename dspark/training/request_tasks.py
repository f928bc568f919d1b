"""Tasks that ask an engine: each yields a request, is sent the answer, and may ask again; many are open at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.request import FinishReason, Request, RequestOutput
from dspark.training.prompt_source import TextSide

_MAX_OPEN = 256  # tasks in the engine's hands; it batches as many of them as it likes
_NOTE_INTERVAL_S = 30.0  # between lines of progress where there is no terminal


class AnswerEngine(Protocol):
    """What answers requests, many at a time; `dspark.engine.engine.Engine` does."""

    @property
    def tokenizer(self) -> TextSide: ...

    @property
    def max_model_len(self) -> int: ...

    def validate(self, request: Request) -> None: ...

    def add_request(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All that came of one request."""

    text: str
    token_ids: list[int]  # the end token included
    finish_reason: FinishReason
    error: str | None


Task = Generator[Request, Answer, None]  # its requests pass `AnswerEngine.validate`


def work_off(
    engine: AnswerEngine, tasks: Iterable[Task], progress: TaskProgress, *, wants_to_stop: Callable[[], bool]
) -> bool:
    """Keep `engine` busy until all tasks have ended; return False when `wants_to_stop` ended it before."""
    waiting, opened = iter(tasks), dict[str, _Open]()

    def go_on(task: Task, answer: Answer | None) -> None:
        try:
            request = next(task) if answer is None else task.send(answer)
        except StopIteration:
            progress.task_done()
            return
        engine.add_request(request)
        opened[request.request_id] = _Open(task=task)

    try:
        while not wants_to_stop():
            while len(opened) < _MAX_OPEN and (task := next(waiting, None)) is not None:
                go_on(task, None)
            if not opened:
                return True
            for output in engine.step():
                entry = opened[output.request_id]
                answer = entry.add(output)
                if answer is not None:
                    del opened[output.request_id]
                    go_on(entry.task, answer)
            progress.note()
        return False
    finally:  # also after an error: nothing of this stays in the engine
        for request_id in opened:
            engine.abort(request_id)
        while opened and engine.has_unfinished():
            engine.step()


@dataclass(kw_only=True)
class _Open:
    """A request in the engine, and the task that waits for it."""

    task: Task
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def add(self, output: RequestOutput) -> Answer | None:
        """Take what a step adds; return the answer with the last of it."""
        self.text += output.text
        self.token_ids += output.token_ids
        if output.finish_reason is None:
            return None
        return Answer(text=self.text, token_ids=self.token_ids, finish_reason=output.finish_reason, error=output.error)


class TaskProgress(AbstractContextManager["TaskProgress"]):
    """A bar on the terminal (stderr), or a line now and then where there is none."""

    def __init__(self, *, is_shown: bool) -> None:
        self._console = Console(stderr=True)
        self._is_shown = is_shown
        self._has_bar = is_shown and self._console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._has_bar)
        self._task = self._bar.add_task("", visible=False)
        self._label, self._num_done, self._num_tasks = "", 0, 0
        self._noted_at = time.monotonic()

    def __enter__(self) -> TaskProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, label: str, *, num_tasks: int, num_done: int) -> None:
        """Begin to count tasks of another kind, `num_done` of which an earlier run did."""
        self._label, self._num_done, self._num_tasks = label, num_done, num_tasks
        self._task = self._bar.add_task(label, total=num_tasks, completed=num_done)
        if num_done:
            self.say(f"{label}: going on after {num_done} of {num_tasks}")

    def task_done(self) -> None:
        """Count a task that ended."""
        self._num_done += 1
        self._bar.update(self._task, completed=self._num_done)

    def note(self) -> None:
        """Say how far the tasks are, where no bar shows it and the last time is long ago."""
        if not self._has_bar and time.monotonic() - self._noted_at >= _NOTE_INTERVAL_S:
            self._noted_at = time.monotonic()
            self.say(f"{self._label}: {self._num_done} of {self._num_tasks}")

    def say(self, message: str) -> None:
        """Print a line for people."""
        if self._is_shown:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)

"""Separates the section in which a model thinks from its answer, while the text comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from dspark.engine.detokenizer import HasBackend, token_bytes

REASONING_START = "<think>"
REASONING_END = "</think>"


@dataclass(slots=True)
class Reasoning:
    """Text of the reasoning section."""

    text: str


@dataclass(slots=True)
class Content:
    """Text for the user."""

    text: str


class _State(Enum):
    START = auto()  # nothing but white space and a beginning of the start mark was read
    REASONING = auto()
    GAP = auto()  # line breaks after the end mark
    ANSWER = auto()


class ReasoningSplitter:
    """Splits one answer. A section counts only at the very beginning; `is_open` says that the prompt has begun it.

    Line breaks next to the marks belong to them. Text without a section stays as it is.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._state = _State.START
        self._has_reasoned = False
        self._held = ""

    def push(self, text: str) -> list[Reasoning | Content]:
        """Take more text and return what it settles."""
        self._held += text
        parts: list[Reasoning | Content] = []
        if self._state is _State.START:
            self._start()
        if self._state is _State.REASONING:
            self._reason(parts)
        if self._state is _State.GAP:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER and self._held:
            parts.append(Content(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Reasoning | Content]:
        """Return what was held back; the text has ended."""
        held, self._held = self._held, ""
        if not held or self._state is _State.GAP:
            return []
        is_reasoning = self._state is _State.REASONING or (self._state is _State.START and self._is_open)
        return [Reasoning(held) if is_reasoning else Content(held)]

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(REASONING_START):
            self._state, self._held = _State.REASONING, text[len(REASONING_START) :]
        elif not REASONING_START.startswith(text):
            self._state = _State.REASONING if self._is_open else _State.ANSWER

    def _reason(self, parts: list[Reasoning | Content]) -> None:
        if not self._has_reasoned:
            self._held = self._held.lstrip("\n")
        text, mark, rest = self._held.partition(REASONING_END)
        if mark:
            self._state, self._held = _State.GAP, rest
            text = text.rstrip("\n")
        else:
            num_mark = next(n for n in range(len(REASONING_END), -1, -1) if text.endswith(REASONING_END[:n]))
            text = text[: len(text) - num_mark].rstrip("\n")
            self._held = self._held[len(text) :]
        if text:
            self._has_reasoned = True
            parts.append(Reasoning(text))


class ReasoningCounter:
    """Counts the tokens of one answer's reasoning section, its marks included.

    It counts token by token, so that the count cannot depend on how many came at once.
    """

    def __init__(self, tokenizer: HasBackend, *, is_open: bool) -> None:
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._is_open = is_open
        self._has_ended = False
        self._text = b""  # of the section's beginning, later of its last bytes
        self._has_begun = is_open

    def push(self, token_ids: Sequence[int]) -> None:
        """Take more tokens of the answer."""
        for token_id in token_ids:
            if self._has_ended:
                return
            self._push(token_bytes(self._tokenizer, token_id))

    def _push(self, data: bytes) -> None:
        self.num_tokens += 1
        self._text += data
        if not self._has_begun:
            text = self._text.lstrip()
            start = REASONING_START.encode()
            if not start.startswith(text[: len(start)]):
                self._has_ended, self.num_tokens = True, 0
            self._has_begun = text.startswith(start)
            if not self._has_begun:
                return
        end = REASONING_END.encode()
        self._has_ended = end in self._text
        self._text = self._text[-(len(end) - 1) :]

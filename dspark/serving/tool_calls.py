"""Takes a model's text apart into content and tool calls while it comes.

The text is read character by character, so that the parts cannot depend on how it was cut into chunks. Only what may
still turn out to be markup is held back. Text that is no call of a declared tool is content, from its first mark on.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Generator
from dataclasses import dataclass

from dspark.serving.reasoning import Content
from dspark.serving.tool_formats import ToolFormat

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "id", "type", *_ARGUMENT_KEYS})
_SPACES = " \t\n\r"
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ' + _SPACES)
_HEADER = re.compile(r"\s*([a-zA-Z0-9_-]+)\s*(?:\[CALL_ID\]\s*[a-zA-Z0-9]*\s*)?(?:\[ARGS\])?\s*")
_MAX_HEADER_LEN = 200  # characters from [TOOL_CALLS] to the arguments; longer ones are no header


@dataclass(slots=True)
class CallBegin:
    """A call of a declared tool begins; calls are counted from 0."""

    index: int
    call_id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


CallPart = Content | CallBegin | CallArguments
_Char = str | None  # None: the text has ended
_Reader = Generator[None, _Char, _Char]  # reads on and returns a character


class ToolCallParser:
    """Parses one answer. `names` are those of the tools that may be called; after `max_calls` calls the answer ends.

    A call begins when its name is known and its arguments' opening brace was read, and ends where that brace is closed;
    what the model writes between them goes out as it comes, but that raw control characters, which JSON strings may not
    hold, are escaped. White space around calls is dropped, as are further members of a call's object.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self.is_cut = False  # the text ended, or became something else, before some call's arguments did
        self._format = tool_format
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._parts: list[CallPart] = []
        self._has_content = False
        self._unread: list[_Char] = []  # to be read again, the next one last
        self._tape: list[_Char] = []  # what was read since the last point that is settled
        self._steps = self._answer()
        next(self._steps)

    def push(self, text: str) -> list[CallPart]:
        """Take more text and return what it settles."""
        for char in text:
            self._steps.send(char)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[CallPart]:
        """Return what was held back; the text has ended."""
        self._steps.send(None)
        parts, self._parts = self._parts, []
        return parts

    # -- reading -------------------------------------------------------------------------------------------

    def _read(self) -> _Reader:
        if self._unread:
            char = self._unread.pop()
        else:
            char = yield
        self._tape.append(char)
        return char

    def _read_past_spaces(self) -> _Reader:
        while True:
            char = yield from self._read()
            if char is None or char not in _SPACES:
                return char

    def _go_back(self, num_chars: int | None = None) -> None:
        """Let the last characters be read again; None: all since the last settled point."""
        count = len(self._tape) if num_chars is None else num_chars
        while count:
            self._unread.append(self._tape.pop())
            count -= 1

    def _take_tape(self) -> str:
        text = "".join(char for char in self._tape if char is not None)
        self._tape.clear()
        return text

    # -- the answer ----------------------------------------------------------------------------------------

    def _answer(self) -> Generator[None, _Char, None]:
        if self._format.begins_bare:
            if (yield from self._read_past_spaces()) == "{":
                self._go_back(1)
                if not (yield from self._calls(self._format.separator)):
                    self._go_back()
            else:
                self._go_back()
        while not self._is_full and (yield from self._content()):
            lead = self._take_tape()
            if not (yield from self._section()):
                self._go_back()
                self._say(lead)
        while True:  # the answer is complete; more text is none of it
            yield

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def _content(self) -> Generator[None, _Char, bool]:
        """Read up to the next mark, which stays on the tape with the spaces before it. False: the text has ended."""
        start = self._format.start
        self._tape.clear()
        num_matched = 0
        while True:
            char = yield from self._read()
            if char is None:
                held = self._take_tape()
                self._say(held.rstrip() if self.num_calls else held)
                return False
            if char == start[num_matched]:
                num_matched += 1
                if num_matched == len(start):
                    return True
            elif num_matched or char not in _SPACES:
                # Of what looked like a mark the first character is content; a mark may begin after it.
                self._go_back(num_matched)
                self._say(self._take_tape())
                num_matched = 0

    def _section(self) -> Generator[None, _Char, bool]:
        """Read what follows a mark; False: it is no call."""
        if self._format.has_headers:
            return (yield from self._headed_section())
        if not (yield from self._calls(self._format.separator)):
            return False
        yield from self._skip(self._format.end)
        return True

    def _headed_section(self) -> Generator[None, _Char, bool]:
        """Read `[{call}, {call}]`, or `name[ARGS]{arguments}`."""
        char = yield from self._read_past_spaces()
        if char == "[":
            if not (yield from self._calls(self._format.separator)):
                return False
            yield from self._skip(self._format.end)
            return True
        header = ""
        while char is not None and char != "{" and len(header) < _MAX_HEADER_LEN:
            header += char
            char = yield from self._read()
        match = _HEADER.fullmatch(header)
        if char != "{" or match is None or match[1] not in self._names:
            return False
        self._begin(match[1])
        if (yield from self._arguments(is_sent=True)) is None:
            self._go_back()
        return True

    def _calls(self, separator: str) -> Generator[None, _Char, bool]:
        """Read one call or several; False: there is none, and the tape holds what was read."""
        if not (yield from self._call()):
            return False
        self._tape.clear()
        while separator and not self._is_full:
            if (yield from self._read_past_spaces()) != separator or not (yield from self._call()):
                self._go_back()
                break
            self._tape.clear()
        return True

    def _skip(self, mark: str) -> Generator[None, _Char, None]:
        """Read spaces and `mark`; if something else comes, nothing."""
        for index, expected in enumerate(mark):
            char = yield from (self._read() if index else self._read_past_spaces())
            if char != expected:
                self._go_back()
                return
        self._tape.clear()

    # -- one call ------------------------------------------------------------------------------------------

    def _call(self) -> Generator[None, _Char, bool]:
        """Read `{"name": ..., "arguments": {...}}`, members in any order.

        False: it is no call, nothing was sent, and the tape holds what was read. A call that was sent is one, however
        its object goes on; what does not belong to the object is read next.
        """
        name: str | None = None
        arguments: str | None = None
        is_sent = False
        if (yield from self._read_past_spaces()) != "{":
            return False
        char = yield from self._read_past_spaces()
        while char == '"':
            key = yield from self._string()
            if key is None or (key not in _CALL_KEYS and not is_sent) or (yield from self._read_past_spaces()) != ":":
                break
            char = yield from self._read_past_spaces()
            if key == "name" and name is None:
                name = (yield from self._string()) if char == '"' else None
                if name not in self._names:
                    break
                assert name is not None
                if arguments is not None:
                    is_sent = self._begin(name, arguments)
            elif key in _ARGUMENT_KEYS and arguments is None:
                if char != "{":
                    break
                if name is not None:
                    is_sent = self._begin(name)
                arguments = yield from self._arguments(is_sent=is_sent)
                if arguments is None:
                    break
            elif not (yield from self._value(char)):
                break
            char = yield from self._read_past_spaces()
            if char == ",":
                char = yield from self._read_past_spaces()
            elif char == "}":
                if name is not None and not is_sent:
                    is_sent = self._begin(name, "{}")
                return is_sent
            else:
                break
        if is_sent:
            self._go_back()
        return is_sent

    def _begin(self, name: str, arguments: str = "") -> bool:
        self._tape.clear()
        self._parts.append(CallBegin(self.num_calls, self._format.new_call_id(uuid.uuid4().hex), name))
        if arguments:
            self._parts.append(CallArguments(self.num_calls, arguments))
        self.num_calls += 1
        return True

    def _arguments(self, *, is_sent: bool) -> Generator[None, _Char, str | None]:
        """Read an object whose brace was read, and return its text; None: it does not end. Send it if `is_sent`."""
        text = ""
        depth, is_string, is_escaped = 1, False, False
        piece = "{"
        while True:
            if is_sent:
                self._say_arguments(piece)
                self._tape.clear()
            else:
                text += piece
            if not depth:
                return text
            char = yield from self._read()
            if char is None or not (is_string or char in _OUTSIDE_STRINGS):
                self.is_cut |= is_sent
                return None
            piece = char
            if is_string:
                if char < " ":
                    piece = f"u{ord(char):04x}" if is_escaped else f"\\u{ord(char):04x}"
                is_string = is_escaped or char != '"'
                is_escaped = char == "\\" and not is_escaped
            elif char == '"':
                is_string = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1

    def _string(self) -> Generator[None, _Char, str | None]:
        """Read a string whose quote was read, and return what it says; None: it is none."""
        text = '"'
        is_escaped = False
        while True:
            char = yield from self._read()
            if char is None:
                return None
            text += char
            if char == '"' and not is_escaped:
                break
            is_escaped = char == "\\" and not is_escaped
        try:
            value = json.loads(text)
        except ValueError:
            return None
        assert isinstance(value, str), value
        return value

    def _value(self, char: _Char) -> Generator[None, _Char, bool]:
        """Read any value that begins with `char`; False: it does not end."""
        if char == '"':
            return (yield from self._string()) is not None
        if char is not None and char in "{[":
            return (yield from self._arguments(is_sent=False)) is not None
        while char is not None and char not in ',}"' and char in _OUTSIDE_STRINGS:
            char = yield from self._read()
        self._go_back(1)
        return char is not None

    # -- parts ---------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self.num_calls and not self._has_content:
            text = text.lstrip()
        if not text:
            return
        self._has_content = True
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Content):
            last.text += text
        else:
            self._parts.append(Content(text))

    def _say_arguments(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments):
            last.text += text
        else:
            self._parts.append(CallArguments(self.num_calls - 1, text))

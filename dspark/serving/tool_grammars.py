"""Grammars of answers that call tools, in llguidance's dialect of Lark: pure functions of formats and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.serving.reasoning import REASONING_END, REASONING_START
from dspark.serving.tool_formats import ToolFormat

# As models were trained to write JSON, and as chat templates show it to them: one line, a space after "," and ":".
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = r"/(.|\n)*/"
_TEXT_WITHOUT_BRACE = r"/(\s*[^{\s](.|\n)*)?/"  # does not begin with a brace


@dataclass(frozen=True, kw_only=True)
class ToolGrammar:
    """What the grammar of an answer depends on, and the grammar itself: `text`."""

    tool_format: ToolFormat
    parameters: Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by name of the tools to be called
    is_required: bool  # the answer is calls; else it is any text, in which what begins like a call is one
    is_parallel: bool  # several calls are allowed
    mark_token_ids: Mapping[str, int]  # marks that are tokens of their own, which no text matches
    has_reasoning: bool = False  # a reasoning section may come first
    is_reasoning_open: bool = False  # the prompt has begun it

    @property
    def text(self) -> str:
        """The grammar as Lark."""
        lines = [f"start: {self._reasoning()}answer", f"answer: {self._answer()}"]
        if not self.is_required:
            lines.append(f"TEXT: {_TEXT_WITHOUT_BRACE if self.tool_format.begins_bare else _ANY_TEXT}")
            lines.append(f"begin{self._text_until(self.tool_format.start, 'TEXT')}")
        if self.has_reasoning:
            lines += [f"reasoning{self._text_until(REASONING_END, 'REASONING')}", f"REASONING: {_ANY_TEXT}"]
            lines.append(r"GAP: /\n{0,2}/")
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(self.parameters))))
        for index, (name, schema) in enumerate(self.parameters.items()):
            lines.append(f"call_{index}: {self._call(name, f'arguments_{index}')}")
            lines.append(f"arguments_{index}: %json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}")
        return "\n".join(lines) + "\n"

    def _reasoning(self) -> str:
        if not self.has_reasoning:
            return ""
        gap = " GAP" if self.is_required else ""
        section = f"reasoning{gap}"
        return f"{section} " if self.is_reasoning_open else f"({self._mark(REASONING_START)} {section})? "

    def _answer(self) -> str:
        """Return the rule of what comes after the reasoning."""
        tool_format = self.tool_format
        section, repeats = self._section()
        if self.is_required:
            if tool_format.begins_bare:
                return section
            calls = f"{self._mark(tool_format.start)} {section}"
            joint = "" if tool_format.writes_headers else '"\\n" '
            return f"{calls} ({joint}{calls})*" if repeats else calls
        marked = f"begin {section}"
        if tool_format.begins_bare:
            return f"{section} | {marked} | TEXT"
        return f"({marked})* TEXT" if repeats else f"{marked} | TEXT"

    def _section(self) -> tuple[str, bool]:
        """Return what follows a start mark, and whether mark and section may be repeated."""
        tool_format = self.tool_format
        if tool_format.writes_headers:
            return "call", self.is_parallel
        if tool_format.has_headers:
            return f'" "? "[" {self._list(", ")} "]"', False
        if tool_format.end:
            return f'"\\n" call "\\n" {self._mark(tool_format.end)}', self.is_parallel
        return self._list("; "), False

    def _list(self, separator: str) -> str:
        return f'call ("{separator}" call)*' if self.is_parallel else "call"

    def _call(self, name: str, arguments: str) -> str:
        if self.tool_format.writes_headers:
            return f"{json.dumps(name)} {self._mark('[ARGS]')} {arguments}"
        head = f'{{"name": "{name}", "{self.tool_format.arguments_key}": '
        return f'{json.dumps(head)} {arguments} "}}"'

    def _mark(self, mark: str) -> str:
        token_id = self.mark_token_ids.get(mark)
        return json.dumps(mark) if token_id is None else f"<[{token_id}]>"

    def _text_until(self, mark: str, text: str) -> str:
        """Return the rest of a rule: text up to a mark and the mark, as soon as it comes."""
        return f": {text} {self._mark(mark)}" if mark in self.mark_token_ids else f"[lazy]: {text} {self._mark(mark)}"

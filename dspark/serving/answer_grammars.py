"""Grammars of chats' answers in llguidance's dialect of Lark: reasoning, tool calls, content of some structure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.serving.reasoning import REASONING_END, REASONING_START
from dspark.serving.tool_formats import ToolFormat
from dspark.structure import Structure

# As models were trained to write JSON, and as chat templates show it to them: one line, a space after "," and ":".
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = r"/(.|\n)*/"
_TEXT_WITHOUT_BRACE = r"/(\s*[^{\s](.|\n)*)?/"  # does not begin with a brace


@dataclass(frozen=True, kw_only=True)
class AnswerGrammar:
    """What the grammar of an answer depends on, and the grammar itself: `text`."""

    tool_format: ToolFormat | None = None  # None where no tools may be called
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the tools: JSON schemas by name
    is_required: bool = False  # the answer is calls; else it is content, or any text in which calls may stand
    is_parallel: bool = True  # several calls are allowed
    content: str | None = None  # the rule of content, see `content_rule`; None: any text
    mark_token_ids: Mapping[str, int]  # marks that are tokens of their own, which no text matches
    has_reasoning: bool = False  # a reasoning section may come first
    is_reasoning_open: bool = False  # the prompt has begun it

    @property
    def text(self) -> str:
        """The grammar as Lark."""
        lines = [f"start: {self._reasoning()}answer", f"answer: {self._answer()}"]
        if self.content is not None:
            lines.append(f"content: {self.content}")
        elif self.tool_format is not None and not self.is_required:
            lines.append(f"TEXT: {_TEXT_WITHOUT_BRACE if self.tool_format.begins_bare else _ANY_TEXT}")
            lines.append(f"begin{self._text_until(self.tool_format.start, 'TEXT')}")
        if self.has_reasoning:
            lines += [f"reasoning{self._text_until(REASONING_END, 'REASONING')}", f"REASONING: {_ANY_TEXT}"]
            lines.append(r"GAP: /\n{0,2}/")
        if self.parameters:
            lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(self.parameters))))
        for index, (name, schema) in enumerate(self.parameters.items()):
            lines.append(f"call_{index}: {self._call(name, f'arguments_{index}')}")
            lines.append(f"arguments_{index}: %json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}")
        return "\n".join(lines) + "\n"

    def _reasoning(self) -> str:
        if not self.has_reasoning:
            return ""
        gap = " GAP" if self.is_required or self.content is not None else ""
        section = f"reasoning{gap}"
        return f"{section} " if self.is_reasoning_open else f"({self._mark(REASONING_START)} {section})? "

    def _answer(self) -> str:
        """Return the rule of what comes after the reasoning."""
        tool_format = self.tool_format
        if tool_format is None:
            return "content"
        section, repeats = self._section(tool_format)
        if self.is_required or self.content is not None:
            calls = section if tool_format.begins_bare else f"{self._mark(tool_format.start)} {section}"
            joint = "" if tool_format.writes_headers else '"\\n" '
            calls = f"{calls} ({joint}{calls})*" if repeats else calls
            return calls if self.is_required else f"{calls} | content"
        marked = f"begin {section}"
        if tool_format.begins_bare:
            return f"{section} | {marked} | TEXT"
        return f"({marked})* TEXT" if repeats else f"{marked} | TEXT"

    def _section(self, tool_format: ToolFormat) -> tuple[str, bool]:
        """Return what follows a start mark, and whether mark and section may be repeated."""
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
        assert self.tool_format is not None
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


def content_rule(structure: Structure) -> str | None:
    """Return the rule of content that has a structure; None for a grammar, which has rules and names of its own."""
    match structure.kind:
        case "json_schema":
            return f"%json {structure.text}"
        case "regex":
            # A slash would end the expression, a line break the rule; what is escaped stays so.
            text = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", structure.text, flags=re.DOTALL)
            return f"/{text}/".replace("\n", r"\n")
        case "choice":
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(structure.text))
        case "grammar":
            return None

"""Parts of a chat's answer as the API writes them: deltas of a stream, and the whole message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dspark.serving.chat_dialect import ChatPart
from dspark.serving.reasoning import Content, Reasoning
from dspark.serving.tool_calls import CallArguments, CallBegin


def delta(part: ChatPart) -> dict[str, Any]:
    """Return the delta of one part. A call's first one has its id and name, the others only arguments."""
    match part:
        case Content():
            return {"content": part.text}
        case Reasoning():
            return {"reasoning_content": part.text}
        case CallBegin():
            return {"tool_calls": [{"index": part.index, **_call(part, "")}]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def message(parts: Iterable[ChatPart]) -> dict[str, Any]:
    """Return the message that all parts of an answer make. Its content is null beside calls without a text."""
    content: list[str] = []
    reasoning: list[str] = []
    begins: list[CallBegin] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Content():
                content.append(part.text)
            case Reasoning():
                reasoning.append(part.text)
            case CallBegin():
                begins.append(part)
                arguments.append([])
            case CallArguments():
                arguments[part.index].append(part.text)
    fields: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        fields["reasoning_content"] = "".join(reasoning)
    if begins:
        fields["content"] = fields["content"] or None
        fields["tool_calls"] = [_call(begin, "".join(texts)) for begin, texts in zip(begins, arguments, strict=True)]
    return fields


def _call(begin: CallBegin, arguments: str) -> dict[str, Any]:
    return {"id": begin.call_id, "type": "function", "function": {"name": begin.name, "arguments": arguments}}

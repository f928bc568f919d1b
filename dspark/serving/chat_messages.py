"""Messages of a chat as requests bring them, and as chat templates take them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from dspark.errors import RequestError
from dspark.serving.unsupported_fields import NEUTRAL_MESSAGE

# Of everything that bodies are made of. Strict: "5" and true are not 5. Defaults are the API's, not None, where null
# means "the default".
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(BaseModel):
    """One part of a message's content; only text is supported."""

    model_config = STRICT

    type: Literal["text"]
    text: str


class FunctionCall(BaseModel):
    """What an earlier answer called."""

    model_config = STRICT

    name: str
    arguments: str  # JSON

    def as_template_input(self) -> dict[str, Any]:
        """Return the call as chat templates take it, its arguments read."""
        return {"name": self.name, "arguments": json.loads(self.arguments)}


class ToolCall(BaseModel):
    """One call of an earlier answer, as it came."""

    model_config = STRICT

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients that put streams together leave it in


class ChatMessage(BaseModel):
    """One message. Which roles exist is the chat template's business."""

    model_config = STRICT
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_MESSAGE

    role: str
    content: str | list[TextPart] | None = None  # only an assistant that calls tools may say nothing
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None  # the call that a message of role "tool" answers
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it

    def check(self, where: str) -> None:
        """Raise `RequestError` when fields contradict each other; `where` is the message's place in the request."""
        if self.tool_calls and self.role != "assistant":
            raise RequestError(
                f"{where}.tool_calls are for the role assistant, not {reprlib.repr(self.role)}; leave them out",
                param=f"{where}.tool_calls",
            )
        for index, call in enumerate(self.tool_calls or ()):
            if not _is_json_object(call.function.arguments):
                place = f"{where}.tool_calls[{index}].function.arguments"
                raise RequestError(
                    f"{place} ({reprlib.repr(call.function.arguments)}) must be a JSON object as text; correct it",
                    param=place,
                )
        if self.content is None and not self.tool_calls:
            raise RequestError(f"{where}.content is missing; it is required", param=f"{where}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise RequestError(
                f"{where}.tool_call_id is missing; name the call that the message answers",
                param=f"{where}.tool_call_id",
            )
        if len({self.reasoning, self.reasoning_content} - {None}) > 1:
            raise RequestError(
                f"{where}.reasoning and {where}.reasoning_content differ; send one of them", param=f"{where}.reasoning"
            )

    def as_template_input(self) -> dict[str, Any]:
        """Return what chat templates take; text parts are joined by newlines."""
        content = self.content or ""
        content = content if isinstance(content, str) else "\n".join(part.text for part in content)
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        extras = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        message: dict[str, Any] = {"role": self.role, "content": content}
        message |= {key: value for key, value in extras.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.as_template_input()}
                for call in self.tool_calls
            ]
        return message


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

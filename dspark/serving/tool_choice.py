"""The tools of a chat completion, and which of them the answer may or must call."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, PlainValidator
from pydantic_core import PydanticCustomError

from dspark.errors import RequestError
from dspark.serving.chat_messages import STRICT

MAX_TOOLS = 128  # the OpenAI API's limit
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _name(value: Any) -> str:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise PydanticCustomError("name", "must be 1 to 64 letters, digits, underscores and dashes")


def _parameters(value: Any) -> dict[str, Any]:
    """Read a schema of objects; none is that of a function without parameters."""
    if value is None:
        return {"type": "object", "properties": {}}
    if isinstance(value, dict) and value.get("type", "object") == "object":
        return {"type": "object", **value}
    raise PydanticCustomError("parameters", 'must be a JSON schema of type "object"')


class Function(BaseModel):
    """What a tool is to the model."""

    model_config = STRICT

    name: Annotated[str, PlainValidator(_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], PlainValidator(_parameters)] = {"type": "object", "properties": {}}
    strict: bool | None = None  # arguments always follow the schema


class Tool(BaseModel):
    """One tool; only functions are supported."""

    model_config = STRICT

    type: Literal["function"]
    function: Function

    def as_template_input(self) -> dict[str, Any]:
        """Return what chat templates show the model."""
        return {"type": self.type, "function": self.function.model_dump(exclude={"strict"}, exclude_none=True)}


class ToolName(BaseModel):
    """Which function."""

    model_config = STRICT

    name: str


class NamedTool(BaseModel):
    """The one tool that the answer must call."""

    model_config = STRICT

    type: Literal["function"]
    function: ToolName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def callable_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """Return the tools that the answer may call. Raises `RequestError` when the choice does not fit the tools."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools[{index}].function.name"
            raise RequestError(f"{param} ({name!r}) is the name of an earlier tool; rename one of them", param=param)
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise RequestError(
                f"tool_choice names {reprlib.repr(wanted)}, which is none of the tools; add it or choose another",
                param="tool_choice",
            )
        return [tools[names.index(wanted)]]
    if choice == "required" and not tools:
        raise RequestError('tool_choice ("required") needs tools; add some or leave it out', param="tool_choice")
    return list(tools)

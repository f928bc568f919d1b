"""How models write tool calls: the formats in the field, and which one a chat template teaches."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls: `start`, one call or several with `separator` between them, `end`."""

    name: str
    start: str  # the mark that calls follow
    end: str = ""
    separator: str = ""  # empty: each call has a start of its own
    begins_bare: bool = False  # an answer may begin with a call that no mark announces
    has_headers: bool = False  # calls stand in a list, or are written name[ARGS]{arguments}
    writes_headers: bool = False  # of these two the model was trained to write the second
    arguments_key: str = "arguments"
    has_short_ids: bool = False  # chat templates refuse ids that are not nine letters and digits

    def new_call_id(self, digits: str) -> str:
        """Return a call's id, made of random hexadecimal `digits`."""
        return digits[:9] if self.has_short_ids else f"call_{digits[:24]}"

    @property
    def marks(self) -> tuple[str, ...]:
        """What must come through detokenisation, be it a special token."""
        others = ("[ARGS]", "[CALL_ID]") if self.has_headers else (self.end,)
        return tuple(mark for mark in (self.start, *others) if mark)


# <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>, once for each call: Hermes, Qwen 2.5 and 3.
HERMES = ToolFormat(name="hermes", start="<tool_call>", end="</tool_call>")
# {"name": ..., "parameters": {...}} as the whole answer, perhaps after <|python_tag|>; several with ";" between them.
LLAMA3_JSON = ToolFormat(
    name="llama3_json", start="<|python_tag|>", separator=";", begins_bare=True, arguments_key="parameters"
)
# [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
MISTRAL = ToolFormat(name="mistral", start="[TOOL_CALLS]", end="]", separator=",", has_headers=True, has_short_ids=True)
# [TOOL_CALLS]name[ARGS]{...}, once for each call
MISTRAL_ARGS = ToolFormat(
    name="mistral_args", start="[TOOL_CALLS]", end="]", separator=",", has_headers=True, writes_headers=True,
    has_short_ids=True,
)  # fmt: skip

TOOL_FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS)}

# Calls in <tool_call> that are no JSON objects: Qwen3-Coder's and GLM's.
_NOT_HERMES = re.compile(r"<function=|<arg_key>")
# How Llama's templates tell the model to answer.
_LLAMA_JSON_CALL = re.compile(r"\{\s*\\?\"name\\?\":[^{}]*\\?\"parameters\\?\":")


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches the model; None: none that is known."""
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL_ARGS if "[ARGS]" in chat_template else MISTRAL
    if "<tool_call>" in chat_template:
        return None if _NOT_HERMES.search(chat_template) else HERMES
    return LLAMA3_JSON if _LLAMA_JSON_CALL.search(chat_template) else None

"""Prompt files: JSON lines with `prompt`, `turns`, `messages` or `prompt_ids`, and three built-in sets.

Records of training data are prompts too: their answers are left aside.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from dspark.errors import DsparkError
from dspark.models.tokenizer import Tokenizer

# Ordinary chat, code and maths; text that repeats, edits or extracts; random-looking text that no drafter foresees.
BUILT_IN = ("mixed", "repetitive", "hostile")


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One line of a prompt file: raw text, user turns (the first is asked), a conversation to answer, or token ids."""

    prompt: str | None = None
    turns: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()  # up to the turn that is to be answered
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # of `messages`: its tools
    prompt_ids: tuple[int, ...] = ()

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the prompt as the model sees it; turns go through the chat template where there is one."""
        if self.prompt_ids:
            return list(self.prompt_ids)
        if self.prompt is not None:
            return tokenizer.encode(self.prompt)
        if self.messages:
            return tokenizer.render_chat(self.messages, template_kwargs=self.template_kwargs)
        if not tokenizer.has_chat_template:
            return tokenizer.encode(self.turns[0])
        return tokenizer.render_chat([{"role": "user", "content": self.turns[0]}])


def load_prompts(source: Path | str) -> list[PromptRecord]:
    """Read a prompt file, or a built-in set by name. Raises `DsparkError` naming the line that is wrong."""
    path = files("dspark.evaluation") / f"{source}.jsonl" if source in BUILT_IN else Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DsparkError(
            f"cannot read the prompt file {source}: {error}; give a file of JSON lines, or one of {', '.join(BUILT_IN)}"
        ) from error
    records = [_parse(line, f"{source}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise DsparkError(
            f"{source} holds no prompts; give one JSON object a line with the key prompt, turns, messages or prompt_ids"
        )
    return records


def _parse(line: str, where: str) -> PromptRecord:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DsparkError(f"{where}: not JSON ({error}); give one object a line") from error
    found = _record(record) if isinstance(record, dict) else None
    if found is None:
        raise DsparkError(
            f"{where}: needs the key prompt (text), turns (list of texts), messages (list of objects with role and "
            f"content) or prompt_ids (list of token ids), got {line[:80]!r}"
        )
    return found


def _record(record: dict[str, Any]) -> PromptRecord | None:
    """Return what a record asks; None when no key is as it should be."""
    prompt, turns, messages, ids = (record.get(key) for key in ("prompt", "turns", "messages", "prompt_ids"))
    if isinstance(ids, list) and ids and all(type(item) is int and item >= 0 for item in ids):
        return PromptRecord(prompt_ids=tuple(ids))
    if isinstance(prompt, str) and prompt:
        return PromptRecord(prompt=prompt)
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns):
        return PromptRecord(turns=tuple(turns))
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        while messages and messages[-1].get("role") == "assistant":  # an answer that is there already
            messages = messages[:-1]
        kwargs = {"tools": record["tools"]} if record.get("tools") else {}
        return PromptRecord(messages=tuple(messages), template_kwargs=kwargs) if messages else None
    return None

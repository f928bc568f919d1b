"""Prompt files: JSON lines with `prompt` (text) or `turns` (user turns of a chat), and two built-in sets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from dspark.errors import DsparkError
from dspark.models.tokenizer import Tokenizer

BUILT_IN = ("mixed", "repetitive")  # ordinary chat, code and maths; text that repeats, edits or extracts


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One line of a prompt file: raw text, or the user turns of a conversation (the first is asked)."""

    prompt: str | None = None
    turns: tuple[str, ...] = ()

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the prompt as the model sees it; turns go through the chat template where there is one."""
        if self.prompt is not None:
            return tokenizer.encode(self.prompt)
        if not tokenizer.has_chat_template:
            return tokenizer.encode(self.turns[0])
        return tokenizer.render_chat([{"role": "user", "content": self.turns[0]}])


def load_prompts(source: Path | str) -> list[PromptRecord]:
    """Read a prompt file, or a built-in set by name. Raises `DsparkError` naming the line that is wrong."""
    path = files("dspark.evaluation") / f"{source}.jsonl" if source in BUILT_IN else Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DsparkError(f"cannot read the prompt file {source}: {error}") from error
    records = [_parse(line, f"{source}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise DsparkError(f"{source} holds no prompts; give one JSON object a line with the key prompt or turns")
    return records


def _parse(line: str, where: str) -> PromptRecord:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DsparkError(f"{where}: not JSON ({error}); give one object a line") from error
    if isinstance(record, dict):
        prompt, turns = record.get("prompt"), record.get("turns")
        if isinstance(prompt, str) and prompt:
            return PromptRecord(prompt=prompt)
        if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns):
            return PromptRecord(turns=tuple(turns))
    raise DsparkError(f"{where}: needs the key prompt (text) or turns (list of texts), got {line[:80]!r}")

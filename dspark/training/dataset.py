"""Conversations from JSON lines: token ids, which of them the target answered, and which are held out.

A record has `prompt_ids` and `response_ids`, or `messages` (and perhaps `tools`) for the target's chat template.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dspark.errors import ConfigError, RequestError


class ChatRenderer(Protocol):
    """What conversations need of a tokenizer."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The ids of one conversation; immutable, shared by all epochs."""

    index: int  # position among all conversations kept; features are stored in this order
    token_ids: np.ndarray  # [T] int64
    is_supervised: np.ndarray  # [T] bool, tokens that the target wrote
    is_held_out: bool
    temperature: float | None = None  # at which the target wrote it, where the record says so

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """All conversations with an answer, and how many records had to be changed or left out."""

    conversations: tuple[Conversation, ...]
    num_unanswered: int  # records without a supervised token within `max_length`
    num_cut: int  # conversations longer than `max_length`

    @property
    def training(self) -> list[Conversation]:
        return [conversation for conversation in self.conversations if not conversation.is_held_out]

    @property
    def held_out(self) -> list[Conversation]:
        return [conversation for conversation in self.conversations if conversation.is_held_out]

    @property
    def num_tokens(self) -> int:
        return sum(conversation.num_tokens for conversation in self.conversations)

    def answer_counts(self, vocab_size: int) -> np.ndarray:
        """Return how often each id [V] stands in the answers of training conversations."""
        counts: Counter[int] = Counter()
        for conversation in self.training:
            counts.update(conversation.token_ids[conversation.is_supervised].tolist())
        result = np.zeros(vocab_size, dtype=np.int64)
        result[list(counts.keys())] = list(counts.values())
        return result


def load_dataset(
    paths: Sequence[Path],
    tokenizer: ChatRenderer,
    *,
    vocab_size: int,
    eos_token_ids: Collection[int] = (),
    max_length: int,
    hold_out_fraction: float,
) -> Dataset:
    """Read conversations in the order of the files; ids must be below `vocab_size`.

    Raises `ConfigError` naming the file and line of a wrong record, an empty file, or data without any answer.
    """
    conversations: list[Conversation] = []
    num_unanswered = num_cut = 0
    for path in paths:
        for place, record in read_records(path):
            ids, supervised = _ids_and_mask(record, tokenizer, eos_token_ids, place)
            if ids and max(ids) >= vocab_size:
                raise ConfigError(
                    f"{place}: token id {max(ids)} is outside the target's vocabulary of {vocab_size} ids; "
                    "use data of this target"
                )
            num_cut += len(ids) > max_length
            mask = np.asarray(supervised[:max_length], dtype=bool)
            if not mask[1:].any():  # the first token has nothing before it that could predict it
                num_unanswered += 1
                continue
            tokens = np.asarray(ids[:max_length], dtype=np.int64)
            prompt = tokens[: int(mask.argmax())]
            conversations.append(
                Conversation(
                    index=len(conversations),
                    token_ids=tokens,
                    is_supervised=mask,
                    is_held_out=_fraction(prompt) < hold_out_fraction,
                    temperature=_temperature(record, place),
                )
            )
    if not conversations:
        raise ConfigError(
            f"none of the {num_unanswered} conversations in {', '.join(map(str, paths))} has an answer within "
            f"max_length ({max_length}); add assistant messages or response_ids"
        )
    if all(conversation.is_held_out for conversation in conversations):
        raise ConfigError(
            f"all {len(conversations)} conversations fall into the held-out part ({hold_out_fraction:g}); add data or "
            "lower hold_out_fraction"
        )
    return Dataset(conversations=tuple(conversations), num_unanswered=num_unanswered, num_cut=num_cut)


def assistant_mask(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: ChatRenderer,
    *,
    eos_token_ids: Collection[int] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation as the server renders them, and which of them the assistant wrote.

    The span of an answer lies between two renderings of prefixes: the one that asks for it and the one that includes
    it. What the template adds after the turn's end token is not the model's. Raises `ConfigError` when a rendering is
    not a prefix of the whole, for then the model would be trained on ids it is never served.
    """

    def render(count: int, *, asks: bool) -> list[int]:
        return tokenizer.render_chat(messages[:count], add_generation_prompt=asks, template_kwargs=template_kwargs)

    ids = render(len(messages), asks=False)
    mask = [False] * len(ids)
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, through = render(number, asks=True), render(number + 1, asks=False)
        if ids[: len(before)] != before or ids[: len(through)] != through or len(through) < len(before):
            raise ConfigError(
                f"the chat template renders message {number} (assistant) differently once more messages follow, so its "
                "ids are not those that are served; split the conversation after each answer, or give prompt_ids and "
                "response_ids"
            )
        ends = [at for at in range(len(before), len(through)) if ids[at] in eos_token_ids]
        end = ends[-1] + 1 if ends else len(through)
        mask[len(before) : end] = [True] * (end - len(before))
    return ids, mask


def read_records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return each record of a file of JSON lines with its place. Raises `ConfigError` naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a file of JSON lines") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place} is not JSON: {error}; write one object a line") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{place} is a JSON {type(record).__name__}, not an object; write one object a line")
        records.append((place, record))
    if not records:
        raise ConfigError(f"{path} holds no records (0 lines); give a file with conversations")
    return records


def _ids_and_mask(
    record: dict[str, Any], tokenizer: ChatRenderer, eos_token_ids: Collection[int], place: str
) -> tuple[list[int], list[bool]]:
    if "response_ids" in record and "prompt_ids" in record:
        prompt, response = (_token_ids(record[key], key, place) for key in ("prompt_ids", "response_ids"))
        return prompt + response, [False] * len(prompt) + [True] * len(response)
    if "messages" not in record:
        raise ConfigError(
            f"{place} has the keys {', '.join(sorted(record)) or '(none)'}; a conversation needs prompt_ids and "
            "response_ids, or messages"
        )
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{place}: messages must be a list of objects with role and content; correct it")
    if not any(message.get("role") == "assistant" for message in messages):
        return [], []
    template_kwargs = {"tools": record["tools"]} if record.get("tools") else None
    try:
        return assistant_mask(messages, tokenizer, eos_token_ids=eos_token_ids, template_kwargs=template_kwargs)
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{place}: {error}") from error


def _temperature(record: dict[str, Any], place: str) -> float | None:
    value = record.get("temperature")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
        raise ConfigError(f"{place}: temperature ({value!r}) must be a number from 0; correct it or leave it out")
    return value


def _token_ids(value: Any, key: str, place: str) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise ConfigError(f"{place}: {key} must be a list of token ids (whole numbers from 0); correct it")
    return value


def _fraction(prompt: np.ndarray) -> float:
    """Return a number in [0, 1) that depends on the prompt alone, so that no prompt is on both sides."""
    digest = hashlib.sha256(prompt.astype("<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64

"""Where prompts come from: conversations of a file, to be answered anew, or the header after which a user writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from dspark.errors import ConfigError, RequestError
from dspark.training.dataset import ChatRenderer, read_records

Message = Mapping[str, Any]  # role, content and what else the chat template reads

# Alike in no token at either end, so that what their renderings share is the template's.
_SENTINELS = ("Why so, Alice", "12 of them?", "zebra: yes!")


class TextSide(ChatRenderer, Protocol):
    """What prompts need of a tokenizer."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ConversationPlan:
    """One record of a prompts file: a raw prompt to continue, or messages with places for the target's answers."""

    index: int  # position among all records
    place: str  # file and line, for messages
    steps: tuple[Message | None, ...] = ()  # None: the target answers
    prompt: str | None = None  # raw text in place of steps
    prompt_ids: tuple[int, ...] | None = None  # ids in place of steps
    user: str | None = None  # text beside `prompt_ids`
    template_kwargs: Mapping[str, Any] | None = None

    @property
    def num_answers(self) -> int:
        return self.steps.count(None) if self.steps else 1


def load_plans(paths: Sequence[Path], *, has_chat_template: bool) -> list[ConversationPlan]:
    """Read files of JSON lines with `prompt`, `turns`, `messages` (and `tools`) or `prompt_ids`.

    Every answer of the assistant is to be written anew, turn by turn, but for its tool calls, whose results follow.
    Raises `ConfigError` naming the file and line that is wrong.
    """
    records = [entry for path in paths for entry in read_records(path)]
    plans = [_plan(index, place, record) for index, (place, record) in enumerate(records)]
    for plan in plans:
        if plan.steps and not has_chat_template:
            raise ConfigError(
                f"{plan.place} is a chat, but the model has no chat template; give raw text under the key prompt"
            )
    return plans


def self_prompted(index: int, user: str) -> ConversationPlan:
    """Return the plan of one user turn that the target wrote itself."""
    return ConversationPlan(index=index, place=f"user turn {index}", steps=({"role": "user", "content": user}, None))


@dataclass(frozen=True, kw_only=True)
class UserHeader:
    """What stands before a user's turn, and the token after it."""

    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


def find_user_header(tokenizer: TextSide) -> UserHeader:
    """Return the ids after which the model expects a user's words: what renderings of different words begin with.

    In ids, not text: a template's last space may belong to the first token of the words. Raises `ConfigError` when the
    model has no chat template, or one that changes the words or puts nothing before them.
    """
    advice = "give a file of prompts in place of self_prompt"
    if not tokenizer.has_chat_template:
        raise ConfigError(f"the model has no chat template, so nothing tells it to write a user's turn; {advice}")
    renderings: list[list[int]] = []
    for words in _SENTINELS:
        try:
            ids = tokenizer.render_chat([{"role": "user", "content": words}])
        except RequestError as error:
            raise ConfigError(f"the chat template refuses a single user turn ({error}); {advice}") from error
        if tokenizer.decode(ids, skip_special_tokens=False).count(words) != 1:
            raise ConfigError(f"the chat template changes or repeats what a user says ({words!r}); {advice}")
        renderings.append(ids)
    header = _common_start(renderings)
    if not set(header) - {tokenizer.bos_token_id}:
        raise ConfigError(f"the chat template puts nothing before a user's turn; {advice}")
    after = _common_start([ids[: len(header) - 1 : -1] for ids in renderings])[::-1]
    is_end_token = bool(after) and after[0] in tokenizer.special_token_ids
    return UserHeader(token_ids=tuple(header), stop_token_ids=tuple(after[:1] if is_end_token else ()))


def _common_start(lists: Sequence[Sequence[int]]) -> list[int]:
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False))]


def _plan(index: int, place: str, record: dict[str, Any]) -> ConversationPlan:
    prompt, prompt_ids, turns, messages = (record.get(key) for key in ("prompt", "prompt_ids", "turns", "messages"))
    if prompt_ids is not None:
        if not _is_list_of(prompt_ids, int) or any(token_id < 0 for token_id in prompt_ids):
            raise ConfigError(f"{place}: prompt_ids must be a list of token ids (whole numbers from 0); correct it")
        user = record.get("user")
        return ConversationPlan(
            index=index, place=place, prompt_ids=tuple(prompt_ids), user=user if isinstance(user, str) else None
        )
    if isinstance(prompt, str) and prompt:
        return ConversationPlan(index=index, place=place, prompt=prompt)
    if turns is not None:
        if not _is_list_of(turns, str) or not all(turns):
            raise ConfigError(f"{place}: turns must be a list of texts, the user's turns; correct it")
        steps = [step for turn in turns for step in ({"role": "user", "content": turn}, None)]
        return ConversationPlan(index=index, place=place, steps=tuple(steps))
    if messages is not None:
        tools = record.get("tools")
        kwargs = {"tools": tools} if tools else None
        return ConversationPlan(index=index, place=place, steps=_steps(messages, place), template_kwargs=kwargs)
    keys = ", ".join(sorted(record)) or "(none)"
    raise ConfigError(
        f"{place} has the keys {keys}; a prompt needs prompt (text), turns (list of texts), messages or prompt_ids"
    )


def _steps(messages: Any, place: str) -> tuple[Message | None, ...]:
    if not _is_list_of(messages, dict) or not all(isinstance(m.get("role"), str) for m in messages):
        raise ConfigError(f"{place}: messages must be a list of objects with role and content; correct it")
    while messages and messages[-1]["role"] == "assistant":  # to be written anew, whatever it is
        messages = messages[:-1]
    steps: list[Message | None] = []
    for message in messages:
        is_answer = message["role"] == "assistant" and not message.get("tool_calls")
        if is_answer and not (steps and steps[-1] is not None and steps[-1]["role"] in ("user", "tool")):
            raise ConfigError(f"{place}: an assistant message follows neither the user nor a tool; correct messages")
        steps.append(None if is_answer else message)
    if not steps or steps[-1] is None or steps[-1]["role"] not in ("user", "tool"):
        raise ConfigError(f"{place}: messages hold nothing to answer at their end; end them with the user or a tool")
    return (*steps, None)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)

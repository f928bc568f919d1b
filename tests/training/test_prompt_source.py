"""Prompts of every kind become conversations with places for answers, and templates say where a user writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import BOS_ID, END_OF_TURN_ID, byte_level_backend
from training_cases import TEMPLATE, write_records

from dspark.errors import ConfigError
from dspark.models.tokenizer import Tokenizer
from dspark.training.prompt_source import ConversationPlan, find_user_header, load_plans

USER = {"role": "user", "content": "q"}
SECOND = {"role": "user", "content": "more"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
TOOL = {"role": "tool", "content": "42"}


def plans(folder: Path, *records: Any) -> list[ConversationPlan]:
    return load_plans([write_records(folder / "prompts.jsonl", records)], has_chat_template=True)


def tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer(byte_level_backend(), special_tokens={"bos_token": "<bos>"}, chat_template=template)


@pytest.mark.parametrize(
    ("messages", "steps"),
    [
        ([USER], (USER, None)),
        ([USER, ANSWER], (USER, None)),
        ([USER, ANSWER, ANSWER], (USER, None)),
        ([SYSTEM, USER, ANSWER, SECOND, ANSWER], (SYSTEM, USER, None, SECOND, None)),
        ([USER, ANSWER, SECOND], (USER, None, SECOND, None)),
        ([USER, SECOND], (USER, SECOND, None)),
        ([USER, CALL, TOOL], (USER, CALL, TOOL, None)),
        ([USER, CALL, TOOL, ANSWER, SECOND, CALL], (USER, CALL, TOOL, None, SECOND, None)),
    ],
)
def test_answers_of_the_assistant_are_places_to_fill_but_tool_calls_stay(
    messages: list[Any], steps: tuple[Any, ...], tmp_path: Path
) -> None:
    (plan,) = plans(tmp_path, {"messages": messages})
    assert plan.steps == steps
    assert plan.num_answers == steps.count(None)


def test_turns_are_the_users_turns(tmp_path: Path) -> None:
    (plan,) = plans(tmp_path, {"turns": ["q", "more"]})
    assert plan.steps == (USER, None, SECOND, None)


def test_raw_prompts_are_text_or_ids(tmp_path: Path) -> None:
    text, ids, known = plans(tmp_path, {"prompt": "Once"}, {"prompt_ids": [5, 6]}, {"prompt_ids": [5], "user": "u"})
    assert (text.prompt, text.steps, text.num_answers) == ("Once", (), 1)
    assert (ids.prompt_ids, ids.user, known.user) == ((5, 6), None, "u")


def test_tools_reach_the_template(tmp_path: Path) -> None:
    with_tools, without = plans(tmp_path, {"messages": [USER], "tools": [{"name": "f"}]}, {"messages": [USER]})
    assert with_tools.template_kwargs == {"tools": [{"name": "f"}]}
    assert without.template_kwargs is None


def test_conversations_are_numbered_through_all_files(tmp_path: Path) -> None:
    paths = [write_records(tmp_path / f"{name}.jsonl", [{"prompt": "x"}] * 2) for name in "ab"]
    found = load_plans(paths, has_chat_template=False)
    assert [plan.index for plan in found] == [0, 1, 2, 3]
    assert found[2].place == f"{tmp_path / 'b.jsonl'}, line 1"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, r"line 1 has the keys \(none\); a prompt needs prompt \(text\), turns"),
        ({"text": "x", "id": 1}, r"has the keys id, text; a prompt needs"),
        ({"prompt": ""}, "has the keys prompt; a prompt needs"),
        ({"turns": []}, "turns must be a list of texts"),
        ({"turns": ["a", ""]}, "turns must be a list of texts"),
        ({"turns": "a"}, "turns must be a list of texts"),
        ({"prompt_ids": []}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [-1]}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [True]}, "prompt_ids must be a list of token ids"),
        ({"messages": []}, "messages must be a list of objects with role"),
        ({"messages": [{"content": "x"}]}, "messages must be a list of objects with role"),
        ({"messages": [ANSWER]}, "hold nothing to answer"),
        ({"messages": [SYSTEM, ANSWER]}, "hold nothing to answer"),
        ({"messages": [SYSTEM, ANSWER, USER]}, "an assistant message follows neither the user nor a tool"),
        ({"messages": [USER, ANSWER, ANSWER, USER]}, "an assistant message follows neither the user nor a tool"),
        ({"messages": [USER, SYSTEM]}, "hold nothing to answer at their end"),
    ],
)
def test_a_wrong_record_is_named(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plans(tmp_path, record)


def test_chats_need_a_chat_template(tmp_path: Path) -> None:
    path = write_records(tmp_path / "prompts.jsonl", [{"prompt": "x"}, {"turns": ["x"]}])
    with pytest.raises(ConfigError, match=r"line 2 is a chat, but the model has no chat template"):
        load_plans([path], has_chat_template=False)


def test_the_header_is_what_stands_before_a_users_words() -> None:
    header = find_user_header(tokenizer(TEMPLATE))
    assert bytes(header.token_ids) == b"user:"
    assert header.stop_token_ids == (END_OF_TURN_ID,)


def test_the_header_keeps_a_system_prompt_that_the_template_adds() -> None:
    header = find_user_header(tokenizer("<bos>Be kind.<end>{{ 'U ' + messages[0].content }}<eos>"))
    assert header.token_ids == (BOS_ID, *b"Be kind.", END_OF_TURN_ID, *b"U ")


def test_a_turn_without_an_end_token_ends_as_the_model_wants() -> None:
    header = find_user_header(tokenizer("[INST] {{ messages[0].content }} [/INST]"))
    assert bytes(header.token_ids) == b"[INST] "
    assert header.stop_token_ids == ()


def test_a_space_that_belongs_to_the_first_word_is_left_to_the_model() -> None:
    """Here a space and the letter after it are one token, as in the vocabularies of words with their space."""
    backend = byte_level_backend()
    backend.add_tokens([" W", " 1", " z"])
    words = Tokenizer(backend, special_tokens={}, chat_template="[INST] {{ messages[0].content }} [/INST]")
    assert bytes(find_user_header(words).token_ids) == b"[INST]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("user: {{ messages[0].content | upper }}", "changes or repeats what a user says"),
        ("user: {{ messages[0].content }} Again: {{ messages[0].content }}", "changes or repeats what a user says"),
        ("no users here", "changes or repeats what a user says"),
        ("{{ messages[0].content }}<end>", "puts nothing before a user's turn"),
        ("<bos>{{ messages[0].content }}<end>", "puts nothing before a user's turn"),
        ("{{ raise_exception('two turns, please') }}", r"refuses a single user turn \(.*two turns, please"),
    ],
)
def test_a_template_that_gives_no_header_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.*; give a file of prompts in place of self_prompt"):
        find_user_header(tokenizer(template))

"""Prompt files."""

from __future__ import annotations

import json

import pytest
from toys import WordTokenizer

from dspark.errors import DsparkError
from dspark.evaluation.prompts import BUILT_IN, PromptRecord, load_prompts


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_sets_load(name):
    records = load_prompts(name)
    assert len({record.turns for record in records}) == len(records) >= 16


@pytest.mark.parametrize("name", ["mixed", "hostile"])
def test_there_are_prompts_for_32_requests_at_a_time(name):
    assert len(load_prompts(name)) == 32


def test_both_keys_and_blank_lines_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "t1"}\n\n{"turns": ["t2", "t3"], "id": 7}\n')
    records = load_prompts(path)
    assert records == [PromptRecord(prompt="t1"), PromptRecord(turns=("t2", "t3"))]
    assert [r.token_ids(WordTokenizer(16)) for r in records] == [[1], [2]]


class ChatTokenizer(WordTokenizer):
    has_chat_template = True

    def render_chat(self, messages, *, add_generation_prompt=True, template_kwargs=None):
        return [len(messages), len((template_kwargs or {}).get("tools", ()))]


def test_conversations_and_token_ids_are_prompts_without_their_answers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [
        {"messages": turns},
        {"messages": [*turns, *turns], "tools": [{}, {}]},
        {"prompt_ids": [5, 6], "response_ids": [7], "user": "a"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [r.token_ids(ChatTokenizer(16)) for r in load_prompts(path)] == [[1, 0], [3, 2], [5, 6]]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"turns": []}',
        '{"turns": [1]}',
        '{"messages": []}',
        '{"messages": [1]}',
        '{"prompt_ids": [1.5]}',
        '{"messages": [{"role": "assistant"}]}',
    ],
)
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(DsparkError, match="line 2"):
        load_prompts(path)


def test_an_empty_or_absent_file_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DsparkError, match="holds no prompts"):
        load_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(DsparkError, match="cannot read the prompt file"):
        load_prompts(tmp_path / "absent.jsonl")

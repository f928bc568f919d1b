"""Conversations: what is supervised, what is held out, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizers import END_OF_TURN_ID
from training_cases import save_target, write_records

from dspark.errors import ConfigError
from dspark.models.tokenizer import Tokenizer, load_tokenizer
from dspark.training.dataset import Dataset, assistant_mask, load_dataset

IDS = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5]}
REPEATED = [
    {"role": "user", "content": "say hi"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hi"},
]


@pytest.fixture(scope="module")
def tokenizer(target_folder: Path) -> Tokenizer:
    return load_tokenizer(target_folder)


def load(path: Path, tokenizer: Tokenizer, **changes: Any) -> Dataset:
    options: dict[str, Any] = {"vocab_size": 264, "eos_token_ids": {256, 258}, "max_length": 64, "hold_out_fraction": 0}
    return load_dataset([path], tokenizer, **options | changes)


def spans(ids: list[int], mask: list[bool], tokenizer: Tokenizer) -> list[str]:
    found: list[list[int]] = []
    for at, token in enumerate(ids):
        if mask[at] and not (at and mask[at - 1]):
            found.append([])
        if mask[at]:
            found[-1].append(token)
    return [tokenizer.decode(span, skip_special_tokens=False) for span in found]


def test_response_ids_are_supervised_and_prompt_ids_are_not(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (only,) = load(write_records(tmp_path / "a.jsonl", [IDS]), tokenizer).conversations
    assert only.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert only.is_supervised.tolist() == [False, False, False, True, True]


def test_only_assistant_turns_are_supervised_without_marks_in_the_template(tokenizer: Tokenizer) -> None:
    """Case M1."""
    ids, mask = assistant_mask(REPEATED, tokenizer, eos_token_ids={256, END_OF_TURN_ID})
    assert spans(ids, mask, tokenizer) == ["hi<end>", "hi<end>"]


def test_the_text_of_an_answer_repeated_by_the_user_is_not_supervised(tokenizer: Tokenizer) -> None:
    """Case M8."""
    ids, mask = assistant_mask(REPEATED, tokenizer, eos_token_ids={256, END_OF_TURN_ID})
    rendered = tokenizer.decode(ids, skip_special_tokens=False)
    assert rendered == "user:say hi<end>\nassistant:hi<end>\nuser:hi<end>\nassistant:hi<end>\n"
    first = rendered.encode().index(b"assistant:hi") - 4 + len(b"assistant:")  # <end> is one id, not five bytes
    assert [at for at, is_on in enumerate(mask) if is_on][:3] == [first, first + 1, first + 2]


def test_training_ids_equal_the_serving_render(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Case M8."""
    record = {"messages": REPEATED, "tools": [{"type": "function", "function": {"name": "f"}}]}
    (only,) = load(write_records(tmp_path / "a.jsonl", [record]), tokenizer, max_length=512).conversations
    served = tokenizer.render_chat(REPEATED, add_generation_prompt=False, template_kwargs={"tools": record["tools"]})
    assert only.token_ids.tolist() == served
    assert tokenizer.decode(served, skip_special_tokens=False).startswith("tools:1<end>")


def test_a_turn_without_an_end_token_is_supervised_whole(tokenizer: Tokenizer) -> None:
    """Case M8."""
    ids, mask = assistant_mask(REPEATED[:2], tokenizer)
    assert spans(ids, mask, tokenizer) == ["hi<end>\n"]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    """Case M1."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if loop.last %}(last){% endif %}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = load_tokenizer(save_target(tmp_path / "target", template=template))
    path = write_records(tmp_path / "a.jsonl", [{"messages": REPEATED}])
    with pytest.raises(ConfigError, match=r"line 1: the chat template renders message 1 \(assistant\) differently"):
        load(path, tokenizer)


def test_records_without_an_answer_are_skipped_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Case M1."""
    unanswered = [{"messages": REPEATED[:1]}, {"prompt_ids": [1, 2], "response_ids": []}]
    dataset = load(write_records(tmp_path / "a.jsonl", [*unanswered, IDS]), tokenizer)
    assert (len(dataset.conversations), dataset.num_unanswered) == (1, 2)


def test_data_without_any_answer_stops(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Case M1."""
    path = write_records(tmp_path / "a.jsonl", [{"messages": REPEATED[:1]}] * 3)
    with pytest.raises(ConfigError, match="none of the 3 conversations"):
        load(path, tokenizer)


def test_an_answer_beyond_max_length_counts_as_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    late = {"prompt_ids": [1] * 8, "response_ids": [2]}
    dataset = load(write_records(tmp_path / "a.jsonl", [late, IDS]), tokenizer, max_length=8)
    assert (len(dataset.conversations), dataset.num_unanswered, dataset.num_cut) == (1, 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no records"),
        ("\n\n", "holds no records"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is a JSON list"),
        ('{"text": "x"}', "line 1 has the keys text; a conversation needs prompt_ids"),
        ('{"prompt_ids": [1], "response_ids": ["a"]}', "response_ids must be a list of token ids"),
        ('{"prompt_ids": [-1], "response_ids": [1]}', "prompt_ids must be a list of token ids"),
        ('{"prompt_ids": [1], "response_ids": [264]}', "token id 264 is outside the target's vocabulary of 264"),
        ('{"messages": "hi"}', "messages must be a list of objects"),
        ('{"prompt_ids": [1], "response_ids": [2], "temperature": "0"}', r"temperature \('0'\) must be a number"),
    ],
)
def test_wrong_records_are_refused_by_line(tmp_path: Path, tokenizer: Tokenizer, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path, tokenizer)


def test_a_missing_file_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read"):
        load(tmp_path / "gone.jsonl", tokenizer)


def test_equal_prompts_are_on_the_same_side(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [{"prompt_ids": [n], "response_ids": [k, 9]} for n in range(40) for k in (1, 2)]
    dataset = load(write_records(tmp_path / "a.jsonl", records), tokenizer, hold_out_fraction=0.5)
    sides: dict[int, set[bool]] = {}
    for one in dataset.conversations:
        sides.setdefault(int(one.token_ids[0]), set()).add(one.is_held_out)
    assert all(len(side) == 1 for side in sides.values())
    assert len(dataset.held_out) == 2 * 22  # of 40 prompts; depends on the hash alone


def test_all_data_held_out_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_records(tmp_path / "a.jsonl", [IDS])
    with pytest.raises(ConfigError, match="all 1 conversations fall into the held-out part"):
        load(path, tokenizer, hold_out_fraction=0.9999999)


def test_ids_are_counted_in_answers_of_the_training_part(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = load(write_records(tmp_path / "a.jsonl", [IDS, IDS]), tokenizer)
    counts = dataset.answer_counts(8)
    np.testing.assert_array_equal(counts, [0, 0, 0, 0, 2, 2, 0, 0])

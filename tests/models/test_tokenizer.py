"""Text, ids, chat templates and vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import MERGES, SPECIAL_TOKENS, TOKENS
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from dspark.errors import CheckpointError, RequestError
from dspark.models.tokenizer import (
    GenerationDefaults,
    Tokenizer,
    compare_vocabularies,
    load_generation_defaults,
    load_tokenizer,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)

EOS = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}  # as older savers spell it


def backend_of(tokens: list[str], special: list[str] = SPECIAL_TOKENS, *, adds_bos: bool = True) -> Backend:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in MERGES if merge.replace(" ", "") in vocab]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return backend


def save(folder: Path, backend: Backend | None = None, **config: Any) -> Path:
    (backend or backend_of(TOKENS)).save(str(folder / "tokenizer.json"))
    defaults = {"bos_token": "<|im_start|>", "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(save(tmp_path))


PLAIN = Tokenizer(backend_of(TOKENS, adds_bos=False), special_tokens={}, chat_template=None)


def test_special_tokens_in_the_text_become_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello<|im_end|>") == [1, TOKENS.index("hello"), 2]


def test_special_tokens_are_added_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello", add_special_tokens=False) == [TOKENS.index("hello")]


def test_decode_leaves_special_tokens_out_unless_asked(tokenizer: Tokenizer) -> None:
    ids = [1, TOKENS.index("hello"), 2]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_decode_ignores_padding_rows_of_the_embedding(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([TOKENS.index("hello"), len(TOKENS) + 7]) == "hello"


def test_vocabulary_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(TOKENS) == 264
    assert tokenizer.vocabulary()["hello"] == TOKENS.index("hello")
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@given(st.text())
def test_any_text_survives_the_way_to_ids_and_back(text: str) -> None:
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        with pytest.raises(RequestError, match="surrogate"):
            PLAIN.encode(text)
    else:
        assert PLAIN.decode(PLAIN.encode(text), skip_special_tokens=False) == text


def test_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")


def test_chat_is_rendered_by_the_template_with_one_bos(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>[user] hello\n[assistant] "
    assert ids.count(1) == 1


def test_chat_without_generation_prompt_ends_after_the_messages(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render_chat([{"role": "user", "content": "hello"}], add_generation_prompt=False)
    assert tokenizer.decode(ids) == "[user] hello\n"


def test_chat_equals_transformers(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages %}\n  {%- if loop.index0 > 1 %}{%- break %}{%- endif %}\n"
        "{{ m | tojson }}{{ eos_token }}{% if tools is none %}-{% endif %}\n{%- endfor %}{{ extra }}"
    )
    save(tmp_path, chat_template=template)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "é <b>"}, {"role": "assistant", "content": "x"}, {"role": "user"}]
    expected = reference.apply_chat_template(messages, extra="!", return_dict=False)
    ids = load_tokenizer(tmp_path).render_chat(messages, add_generation_prompt=False, template_kwargs={"extra": "!"})
    assert ids == expected


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, chat_template="{{ tools[0].function.name }}"))
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert tokenizer.decode(tokenizer.render_chat([], template_kwargs={"tools": tools})) == "look_up"


@pytest.mark.parametrize("place", ["file", "list"])
def test_chats_with_tools_get_a_template_of_their_own_where_there_is_one(tmp_path: Path, place: str) -> None:
    named = [{"name": "default", "template": "hello"}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    save(tmp_path, chat_template=named if place == "list" else "hello")
    if place == "file":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools[0] }}")
        (tmp_path / "chat_template.jinja").write_text("hello")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == ("hello", "{{ tools[0] }}")
    assert tokenizer.takes_tools
    assert tokenizer.decode(tokenizer.render_chat([])) == "hello"
    assert tokenizer.decode(tokenizer.render_chat([], template_kwargs={"tools": []})) == "hello"
    assert tokenizer.decode(tokenizer.render_chat([], template_kwargs={"tools": [{"a": 1}]})).startswith("{")


@pytest.mark.parametrize(
    ("template", "takes_tools"),
    [
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}{{ tools }}{% endif %}", True),
        (
            "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% if tools %}x{% endif %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{{ m.tools }} tools{% endfor %}", False),
        ("{% set tools = [] %}{{ tools }}", False),
        (None, False),
    ],
)
def test_template_tells_whether_it_takes_tools(tmp_path: Path, template: str | None, takes_tools: bool) -> None:
    assert load_tokenizer(save(tmp_path, chat_template=template)).takes_tools == takes_tools


def test_refusal_of_the_template_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="refuses these messages: no tools here") as caught:
        tokenizer.render_chat([{"role": "tool", "content": "x"}])
    assert (caught.value.param, caught.value.status) == ("messages", 400)


@pytest.mark.parametrize("message", [{"role": "user", "content": {"a": 1}}, {}])
def test_messages_the_template_stumbles_over_are_the_requests_fault(tmp_path: Path, message: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(save(tmp_path, chat_template="{{ messages[0]['role'] + messages[0]['content'] }}"))
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.render_chat([message])


def test_template_cannot_reach_python(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "chat_template", "continue_final_message"])
def test_template_variables_of_ours_cannot_be_replaced(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match=f"may not set {name}") as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}], template_kwargs={name: "y"})
    assert caught.value.param == "chat_template_kwargs"


def test_model_without_template_refuses_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("place", ["jinja", "json", "list"])
def test_template_is_found_wherever_savers_put_it(tmp_path: Path, place: str) -> None:
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "hello"}]
    save(tmp_path, chat_template=named if place == "list" else None)
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text("hello")
    if place == "json":
        (tmp_path / "chat_template.json").write_text('{"chat_template": "hello"}')
    assert load_tokenizer(tmp_path).render_chat([]) == [TOKENS.index("hello")]


@pytest.mark.parametrize(
    ("place", "file"),
    [("jinja", "chat_template.jinja"), ("json", "chat_template.json"), ("list", "tokenizer_config.json")],
)
@pytest.mark.parametrize(
    "template", ["x\n{% if %}", "x\n{% for m in messages %}", "x\n{{ messages | no_such_filter }}"]
)
def test_template_with_an_error_is_named_at_load(tmp_path: Path, place: str, file: str, template: str) -> None:
    save(tmp_path, chat_template=[{"name": "default", "template": template}] if place == "list" else None)
    if place != "list":
        text = template if place == "jinja" else json.dumps({"chat_template": template})
        (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=rf"chat template in .*{file} has an error in line 2: "):
        load_tokenizer(tmp_path)


def test_generation_blocks_of_transformers_are_no_error(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    tokenizer = load_tokenizer(save(tmp_path, chat_template=template))
    assert tokenizer.render_chat([{"role": "assistant", "content": "hello"}]) == [TOKENS.index("hello")]


def test_truncation_and_padding_of_the_training_run_are_off(tmp_path: Path) -> None:
    backend = backend_of(TOKENS, adds_bos=False)
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(load_tokenizer(save(tmp_path, backend)).encode("xyz")) == 3


def test_older_folders_keep_special_tokens_in_a_map(tmp_path: Path) -> None:
    backend_of(TOKENS).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|im_start|>"}}')
    assert load_tokenizer(tmp_path).bos_token_id == 1


def test_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    vocab = {token: token_id for token_id, token in enumerate(TOKENS)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello", add_special_tokens=False) == [TOKENS.index("hello")]


def test_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(tmp_path)


def with_tokens(tokens: list[str], special: list[str] = SPECIAL_TOKENS) -> Tokenizer:
    return Tokenizer(backend_of(tokens, special, adds_bos=False), special_tokens={}, chat_template=None)


def test_equal_vocabularies_fit() -> None:
    compare_vocabularies(PLAIN, with_tokens(TOKENS))


def test_permuted_vocabulary_is_refused_with_sizes_and_first_difference() -> None:
    permuted = [*TOKENS[:50], TOKENS[51], TOKENS[50], *TOKENS[52:]]
    with pytest.raises(CheckpointError, match=r"264 tokens.*264 tokens.*token id 50 is 'P' for the target and 'Q'"):
        compare_vocabularies(PLAIN, with_tokens(permuted))


def test_differently_spelled_special_token_fits() -> None:
    other = ["<s>", *TOKENS[1:]]
    compare_vocabularies(PLAIN, with_tokens(other, ["<s>", *SPECIAL_TOKENS[1:]]))


def test_additional_special_token_fits() -> None:
    compare_vocabularies(PLAIN, with_tokens([*TOKENS, "<tool>"], [*SPECIAL_TOKENS, "<tool>"]))


def test_additional_ordinary_token_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"264 tokens.*265\)|token id 264 is None for the target and 'word'"):
        compare_vocabularies(PLAIN, with_tokens([*TOKENS, "word"]))


def test_special_token_against_an_ordinary_one_is_refused() -> None:
    other = [*TOKENS[:40], "<x>", *TOKENS[41:]]
    with pytest.raises(CheckpointError, match="token id 40"):
        compare_vocabularies(PLAIN, with_tokens(other, [*SPECIAL_TOKENS, "<x>"]))


def generation_folder(folder: Path, generation: Any = None, config: Any = None) -> Path:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def test_generation_defaults_are_those_of_the_model(tmp_path: Path) -> None:
    recommended = {
        "eos_token_id": [5, 7],
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "do_sample": True,
    }
    assert load_generation_defaults(generation_folder(tmp_path, recommended, {"eos_token_id": 9})) == (
        GenerationDefaults(
            eos_token_ids=frozenset({5, 7}),
            temperature=0.6,
            top_p=0.95,
            top_k=20,
            min_p=0.0,
            repetition_penalty=1.05,
        )
    )


def test_eos_falls_back_to_the_model_configuration(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path, {"temperature": None}, {"eos_token_id": 9})
    assert load_generation_defaults(folder) == GenerationDefaults(eos_token_ids=frozenset({9}))


def test_eos_falls_back_to_the_text_part_of_a_multimodal_configuration(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path, config={"text_config": {"eos_token_id": [1, 106]}})
    assert load_generation_defaults(folder).eos_token_ids == {1, 106}


def test_eos_falls_back_to_the_tokenizer(tmp_path: Path) -> None:
    assert load_generation_defaults(generation_folder(save(tmp_path))).eos_token_ids == {2}


@pytest.mark.parametrize(
    ("name", "value"), [("eos_token_id", "2"), ("eos_token_id", [-1]), ("temperature", "warm"), ("top_k", 1.5)]
)
def test_ill_typed_generation_value_is_named(tmp_path: Path, name: str, value: Any) -> None:
    folder = generation_folder(tmp_path, {"eos_token_id": 2} | {name: value})
    with pytest.raises(CheckpointError, match=f"{name} .* in .*generation_config"):
        load_generation_defaults(folder)

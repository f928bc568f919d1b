"""Chat templates as models have them, rendered for real: what they write for a call is what is read as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_tokenizers import byte_level_backend
from tokenizers import AddedToken

from dspark.config import ChatConfig
from dspark.errors import RequestError
from dspark.models.tokenizer import Tokenizer
from dspark.request import FinishReason
from dspark.serving.chat_deltas import message
from dspark.serving.chat_dialect import ChatDialect, chat_dialect
from dspark.serving.protocol import ChatCompletionRequest, parse_body

ROLES = "{% if m.role in ['user', 'system'] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HERMES = (
    "{% if tools %}<|im_start|>system\nTools: <tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>. "
    'Call them so: <tool_call>\n{\\"name\\": <name>, \\"arguments\\": <arguments>}\n</tool_call><|im_end|>\n{% endif %}'
    f"{{% for m in messages %}}{ROLES}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n"
    "{% else %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if tools is not none %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.'
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call alone') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>'
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "
    '"id": "{{ c.id[-9:] }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length < 9 %}{{ raise_exception('a short id') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL_ARGS = MISTRAL.replace(
    MISTRAL[MISTRAL.index("[TOOL_CALLS] [") : MISTRAL.index("{{ eos_token }}{% elif")],
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)
TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "mistral_args": MISTRAL_ARGS}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "now")]
CALLS = [("get_weather", '{"city": "Pa\\"ré}", "days": [1, 2]}'), ("now", "{}")]


def dialect_of(template: str | None, *special_tokens: str) -> ChatDialect:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<eos>"}, chat_template=template)
    return chat_dialect(tokenizer, ChatConfig())


def request(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    return parse_body(json.dumps({"model": "m", "messages": messages, **fields}).encode(), ChatCompletionRequest)


def rendered(dialect: ChatDialect, call: ChatCompletionRequest) -> list[int]:
    dialect.check(call)
    tokenizer = dialect.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer.render_chat(
        [m.as_template_input() for m in call.messages], template_kwargs=dialect.template_variables(call)
    )


def text_of(dialect: ChatDialect, call: ChatCompletionRequest) -> str:
    return dialect.tokenizer.decode(rendered(dialect, call), skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_for_a_call_is_read_as_that_call(name: str) -> None:
    dialect = dialect_of(TEMPLATES[name])
    assert dialect.tool_format is not None
    assert dialect.tool_format.name == name
    calls = CALLS[: 1 if name == "llama3_json" else 2]
    tool_calls = [
        {"id": f"call{i:09}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for i, (function, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "Hi"}
    before = text_of(dialect, request([user], tools=TOOLS))
    call = request([user, {"role": "assistant", "content": None, "tool_calls": tool_calls}], tools=TOOLS)
    written = text_of(dialect, call).removeprefix(before)
    written = written[: next(i for i in map(written.find, ("<|im_end|>", "<|eot_id|>", "<eos>")) if i >= 0)]
    reader = dialect.reader(call, ())
    assert reader is not None
    answer = message(reader.push(written, (), is_last=True))
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in answer["tool_calls"]] == calls
    assert answer["content"] is None
    assert reader.finish_reason(FinishReason.STOP) == "tool_calls"


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_and_results_reach_the_model(name: str) -> None:
    dialect = dialect_of(TEMPLATES[name])
    tool_calls = [{"id": "call00000", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": tool_calls},
        {"role": "tool", "tool_call_id": "call00000", "content": "noon"},
    ]
    text = text_of(dialect, request(messages, tools=TOOLS))
    assert text.index("get_weather") < text.index("Hi") < text.index("noon")
    assert "get_weather" not in text_of(dialect, request(messages, tools=TOOLS, tool_choice="none"))


@pytest.mark.parametrize(
    ("kwargs", "end"),
    [({}, "assistant\n"), ({"enable_thinking": True}, "assistant\n"), ({"enable_thinking": False}, "</think>\n\n")],
)
def test_reasoning_goes_to_the_template_and_is_read_from_the_answer(kwargs: dict[str, Any], end: str) -> None:
    dialect = dialect_of(HERMES, "<think>", "</think>")
    call = request(
        [{"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}, {"role": "user", "content": "Hi"}],
        chat_template_kwargs=kwargs,
    )
    text = text_of(dialect, call)
    assert "<think>\nHm.\n</think>\n\nHello<|im_end|>" in text
    assert text.endswith(end)
    assert not dialect.is_reasoning_open(rendered(dialect, call))
    assert len(dialect.kept_token_ids(call)) == 2
    reader = dialect.reader(call, rendered(dialect, call))
    assert reader is not None
    answer = message(reader.push("<think>\nHm.\n</think>\n\nHello", (), is_last=True))
    assert answer == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}


def test_a_prompt_that_ends_in_the_reasoning_mark_has_begun_it() -> None:
    dialect = dialect_of("{{ messages[0].content }}</think>{{ '<think>\n' }}", "<think>", "</think>")
    assert dialect.is_reasoning_open(rendered(dialect, request([{"role": "user", "content": "Hi"}])))


def test_a_model_without_a_chat_template_has_no_dialect() -> None:
    dialect = dialect_of(None)
    assert (dialect.tool_format, dialect.has_reasoning) == (None, False)
    with pytest.raises(RequestError) as caught:
        dialect.check(request([{"role": "user", "content": "Hi"}], tools=TOOLS))
    assert caught.value.param == "tools"


def test_what_the_template_refuses_is_the_requests_fault() -> None:
    call = {"id": "call00000", "function": {"name": "now", "arguments": "{}"}}
    with pytest.raises(RequestError, match="one call alone") as caught:
        rendered(dialect_of(LLAMA), request([{"role": "assistant", "tool_calls": [call, call]}]))
    assert caught.value.param == "messages"

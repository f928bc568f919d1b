"""Tool calls and reasoning over HTTP, driven by the official client, whatever the chunks that the engine makes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from app_client import AppClient
from byte_tokenizers import EOS_ID, VOCAB_SIZE, ToyTokenizer, byte_level_backend
from fake_engine import FakeEngine, says
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel
from sse import events
from tokenizers import AddedToken
from toys import WordTokenizer, make_engine, perfect_proposer, random_proposer

from dspark.config import ChatConfig
from dspark.request import Request, TokenLogprobs

HERMES_TEMPLATE = '{{ tools }} tool_calls <tool_call>\n{"name": name, "arguments": arguments}\n</tool_call>'
THINKING_TEMPLATE = HERMES_TEMPLATE + " <think></think> reasoning_content"
MISTRAL_TEMPLATE = "{{ tools }} tool_calls [TOOL_CALLS] ["

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says how the weather is.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
# Two calls, one of them without arguments.
ANSWER = (
    'I look: \n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"}ré </tool_call>"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)
CALLED = [
    {"name": "get_weather", "arguments": {"city": 'Pa"}ré </tool_call>'}},
    {"name": "now", "arguments": {}},
]
CALLS = [("get_weather", '{"city": "Pa\\"}ré </tool_call>"}'), ("now", "{}")]


class SyncTransport(httpx.BaseTransport):
    """Carries the synchronous client's calls to an application; an answer comes when it is whole."""

    def __init__(self, app: AppClient) -> None:
        self._app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        # The pool's headers are of a connection of its own.
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"host"]
        own = self._app.http.build_request(request.method, request.url.raw_path.decode(), content=request.read())
        own.headers.update(httpx.Headers(headers))
        response = self._app.run(self._app.http.send(own))
        return httpx.Response(response.status_code, headers=response.headers, content=response.content)


@pytest.fixture
def open_chat(open_app: Callable[..., AppClient]) -> Callable[..., AppClient]:
    """Return a function that opens an application over a fake engine with a chat template."""

    def open_chat(script: Any, template: str, *, prompt_end: str = "assistant:", **options: Any) -> AppClient:
        chat = options.pop("chat", None)
        tokenizer = options.pop("tokenizer", None) or ToyTokenizer(
            byte_level_backend(), chat_template=template, prompt_end=prompt_end
        )
        script = says(script) if isinstance(script, str) else script
        return open_app(FakeEngine(script, max_model_len=2000, tokenizer=tokenizer, **options), chat=chat)

    return open_chat


def sync_client(app: AppClient) -> openai.OpenAI:
    http = httpx.Client(transport=SyncTransport(app), base_url="http://test")
    return openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def async_client(app: AppClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=app.http, max_retries=0)


def calls_of(message: Any) -> list[tuple[str, str]]:
    assert all(call.type == "function" and call.id.startswith("call_") for call in message.tool_calls or [])
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def streamed(client: openai.OpenAI, **options: Any) -> Any:
    """Return the choices that the client puts together from a stream."""
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(model="toy", messages=MESSAGES, stream=True, **options):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


# -- calls ---------------------------------------------------------------------------------------------------------


def test_the_client_gets_content_and_calls(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(ANSWER, HERMES_TEMPLATE)
    completion = sync_client(app).chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    (choice,) = completion.choices
    assert (choice.message.content, calls_of(choice.message)) == ("I look:", CALLS)
    assert choice.finish_reason == "tool_calls"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(ANSWER.encode()) + 1


def test_the_asynchronous_client_gets_them_too(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(ANSWER, HERMES_TEMPLATE)

    async def run() -> tuple[Any, Any]:
        client = async_client(app)
        whole = await client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
        async with client.chat.completions.stream(model="toy", messages=MESSAGES, tools=TOOLS) as stream:
            return whole, await stream.get_final_completion()

    for completion in app.run(run()):
        assert completion.choices[0].message.content == "I look:"
        assert calls_of(completion.choices[0].message) == CALLS
        assert completion.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("block_len", [*range(1, 10), 60, 400])
def test_a_stream_makes_the_whole_answer_for_every_block_length(
    open_chat: Callable[..., AppClient], block_len: int
) -> None:
    """G4"""
    app = open_chat(ANSWER, HERMES_TEMPLATE, block_len=block_len)
    completion = streamed(sync_client(app), tools=TOOLS, stream_options={"include_usage": True})
    assert completion.choices[0].message.content == "I look:"
    assert calls_of(completion.choices[0].message) == CALLS
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.usage.completion_tokens == len(ANSWER.encode()) + 1


def test_a_stream_makes_the_whole_answer_for_blocks_of_random_lengths(open_chat: Callable[..., AppClient]) -> None:
    """G4: as many tokens a round as drafts were accepted."""
    app = open_chat(ANSWER, HERMES_TEMPLATE)
    generator = random.Random(5)
    app.engine.block_lens = (generator.randint(1, 9) for _ in itertools.count())
    for _ in range(20):
        completion = streamed(sync_client(app), tools=TOOLS)
        assert completion.choices[0].message.content == "I look:"
        assert calls_of(completion.choices[0].message) == CALLS


@pytest.mark.parametrize("block_len", [1, 7, 400])
def test_deltas_of_calls_have_the_apis_shape(open_chat: Callable[..., AppClient], block_len: int) -> None:
    app = open_chat(ANSWER, HERMES_TEMPLATE, block_len=block_len)
    chunks = [chunk["choices"][0] for chunk in events(app.chat(tools=TOOLS, stream=True).text)]
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(call) == 1 for call in calls)
    begins = [call[0] for call in calls if "id" in call[0]]
    assert [(b["index"], b["type"], b["function"]) for b in begins] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    fragments = [call[0] for call in calls if "id" not in call[0]]
    assert all(set(f) == {"index", "function"} and set(f["function"]) == {"arguments"} for f in fragments)
    assert "".join(f["function"]["arguments"] for f in fragments if f["index"] == 0) == CALLS[0][1]
    if block_len == 1:
        assert len(fragments) > 20  # arguments come as they are written
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_a_whole_answer_of_calls_alone_has_no_content(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat('\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', HERMES_TEMPLATE)
    message = app.chat(tools=TOOLS).json()["choices"][0]["message"]
    call_id = message["tool_calls"][0].pop("id")
    assert call_id.startswith("call_")
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }
    assert streamed(sync_client(app), tools=TOOLS).choices[0].message.content is None


def test_calls_go_to_the_template_and_back(open_chat: Callable[..., AppClient]) -> None:
    """A round with a tool, as clients do it: the message comes back as it came, with the tool's result."""
    app = open_chat(ANSWER, HERMES_TEMPLATE)
    client = sync_client(app)
    first = client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls]
    client.chat.completions.create(model="toy", messages=[*MESSAGES, message, *results], tools=TOOLS)
    rendered, _, variables = app.engine.tokenizer.chat_calls[-1]
    assert [m["role"] for m in rendered] == ["user", "assistant", "tool", "tool"]
    assert rendered[1]["content"] == "I look:"
    assert rendered[1]["tool_calls"] == [
        {"id": message.tool_calls[0].id, "type": "function", "function": CALLED[0]},
        {"id": message.tool_calls[1].id, "type": "function", "function": CALLED[1]},
    ]
    assert rendered[2] == {"role": "tool", "content": "5", "tool_call_id": message.tool_calls[0].id}
    assert variables["tools"] == [
        TOOLS[0],
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]


def test_without_tools_or_with_none_of_them_text_stays_as_it_is(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(ANSWER, HERMES_TEMPLATE)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = app.chat(**fields).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
        assert "tools" not in (app.engine.tokenizer.chat_calls[-1][2] or {})


def test_text_that_is_no_call_stays_content(open_chat: Callable[..., AppClient]) -> None:
    text = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    app = open_chat(text, HERMES_TEMPLATE)
    choice = app.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"
    assert streamed(sync_client(app), tools=TOOLS).choices[0].message.content == text


def test_every_choice_is_read_on_its_own(open_chat: Callable[..., AppClient]) -> None:
    answers = [ANSWER, "Hello", ANSWER.replace("I look", "You look")]

    def script(request: Request) -> Iterator[int]:
        text = answers[int(request.request_id.rsplit("-", 1)[1])]
        return iter([*text.encode(), EOS_ID])

    app = open_chat(script, HERMES_TEMPLATE, block_len=5)
    expected = [("I look:", CALLS, "tool_calls"), ("Hello", [], "stop"), ("You look:", CALLS, "tool_calls")]
    client = sync_client(app)
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, n=3)
    for completion in (whole, streamed(client, tools=TOOLS, n=3)):
        found = [(c.message.content, calls_of(c.message), c.finish_reason) for c in completion.choices]
        assert found == expected


def test_with_parallel_calls_off_the_answer_ends_with_its_first_call(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(ANSWER + " and more", HERMES_TEMPLATE)
    client = sync_client(app)
    options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, **options)
    for completion in (whole, streamed(client, **options)):
        choice = completion.choices[0]
        assert (choice.message.content, calls_of(choice.message)) == ("I look:", CALLS[:1])
        assert choice.finish_reason == "tool_calls"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len((ANSWER + " and more").encode()) + 1  # what was generated


@pytest.mark.parametrize(
    ("options", "finish_reason"), [({"max_tokens": 75}, "length"), ({"stop": ["Pa"]}, "stop"), ({}, "tool_calls")]
)
def test_a_call_that_is_cut_keeps_what_it_has_and_the_reason(
    open_chat: Callable[..., AppClient], options: dict[str, Any], finish_reason: str
) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, the city of light"}}\n</tool_call>'
    app = open_chat(text, HERMES_TEMPLATE)
    choice = app.chat(tools=TOOLS, **options).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Paris, the city of light"}'.startswith(call["function"]["arguments"])
    assert choice["finish_reason"] == finish_reason
    chunks = [chunk["choices"][0] for chunk in events(app.chat(tools=TOOLS, stream=True, **options).text)]
    assert chunks[-1]["finish_reason"] == finish_reason
    arguments = [c["function"]["arguments"] for chunk in chunks for c in chunk["delta"].get("tool_calls", [])]
    assert "".join(arguments) == call["function"]["arguments"]


def test_an_answer_cut_before_a_call_begins_is_content(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(ANSWER, HERMES_TEMPLATE)
    choice = app.chat(tools=TOOLS, max_tokens=30).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ANSWER[:30]}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("block_len", [1, 4, 400])
def test_tokens_of_markup_are_in_token_ids_logprobs_and_usage(
    open_chat: Callable[..., AppClient], block_len: int
) -> None:
    """One entry for each token, in the chunk that brings it, although its text may come later or not at all."""
    app = open_chat(ANSWER, HERMES_TEMPLATE, block_len=block_len)
    make_output = app.engine._output

    def with_logprobs(request: Request, output: Any, **fields: Any) -> Any:
        entries = [TokenLogprobs(token_id=i, logprob=-1.0, top=()) for i in fields.get("token_ids", ())]
        return make_output(request, output, logprobs=entries, **fields)

    app.engine._output = with_logprobs
    body = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = app.chat(**body).json()
    choice = whole["choices"][0]
    token_ids = [*ANSWER.encode(), EOS_ID]
    assert choice["token_ids"] == token_ids
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[i] for i in token_ids[:-1]] + [[*b"<eos>"]]
    assert whole["usage"]["completion_tokens"] == len(token_ids)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(app.chat(**body, stream=True, stream_options=options).text)
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == token_ids
    entries = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert entries == choice["logprobs"]["content"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == len(token_ids)
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks[1:]] == [None] * (len(chunks) - 1)


class Weather(BaseModel):
    """Says how the weather is."""

    city: str


# -- what cannot be done -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        ("{{ messages }}", None, "no place for them"),
        ("{{ messages }}", ChatConfig(tool_call_format="hermes"), "no place for them"),
        ("{{ tools }}", None, "how this model writes calls"),
        (HERMES_TEMPLATE, ChatConfig(tool_call_format="none"), "how this model writes calls"),
    ],
)
def test_tools_that_the_model_does_not_know_are_refused(
    open_chat: Callable[..., AppClient], template: str, chat: ChatConfig | None, message: str
) -> None:
    app = open_chat("Hello", template, chat=chat)
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        sync_client(app).chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    assert caught.value.param == "tools"
    assert app.chat(tools=TOOLS, tool_choice="none").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [*MESSAGES, {"role": "tool", "content": "5", "tool_call_id": "1"}]}, "messages[1].role"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
                ]
            },
            "messages[0].tool_calls",
        ),
    ],
)
def test_messages_that_the_template_would_lose_are_refused(
    open_chat: Callable[..., AppClient], fields: dict[str, Any], param: str
) -> None:
    assert open_chat("Hello", "{{ messages }}").chat(**fields).json()["error"]["param"] == param


def test_tools_in_two_places_are_refused(open_chat: Callable[..., AppClient]) -> None:
    response = open_chat("Hello", HERMES_TEMPLATE).chat(tools=TOOLS, chat_template_kwargs={"tools": []})
    assert response.json()["error"]["param"] == "chat_template_kwargs"


def test_functions_of_the_old_api_are_refused_by_name(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat("Hello", HERMES_TEMPLATE)
    assert app.chat(functions=[{"name": "f"}]).json()["error"]["param"] == "functions"
    assert app.chat(function_call={"name": "f"}).json()["error"]["param"] == "function_call"


# -- formats -------------------------------------------------------------------------------------------------------


def marked_tokenizer(*marks: str, chat_template: str) -> ToyTokenizer:
    """Return a byte-level tokenizer with special tokens of its own, from id 262 on."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return ToyTokenizer(backend, chat_template=chat_template)


def test_special_tokens_that_mark_calls_are_read_and_others_stay_hidden(open_chat: Callable[..., AppClient]) -> None:
    tokenizer = marked_tokenizer("[TOOL_CALLS]", "<pad>", chat_template=MISTRAL_TEMPLATE)
    call, pad = (tokenizer.backend.token_to_id(mark) for mark in ("[TOOL_CALLS]", "<pad>"))
    assert call < VOCAB_SIZE
    token_ids = [*b"Hi ", pad, call, *b' [{"name": "now", "arguments": {}}]', EOS_ID]
    app = open_chat(lambda request: token_ids, "", tokenizer=tokenizer)
    choice = app.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == "Hi"
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "now", "arguments": "{}"}
    assert len(made["id"]) == 9
    without = app.chat().json()["choices"][0]["message"]["content"]
    assert without == 'Hi  [{"name": "now", "arguments": {}}]'


def test_the_format_can_be_chosen(open_chat: Callable[..., AppClient]) -> None:
    text = '{"name": "now", "parameters": {}}'
    app = open_chat(text, HERMES_TEMPLATE, chat=ChatConfig(tool_call_format="llama3_json"))
    assert app.chat(tools=TOOLS).json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    app = open_chat(text, HERMES_TEMPLATE)
    assert app.chat(tools=TOOLS).json()["choices"][0]["message"]["content"] == text


# -- reasoning -----------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nHm, é.\n</think>\n\n"


@pytest.mark.parametrize("block_len", [1, 2, 5, 400])
def test_reasoning_is_separated_from_content_and_calls(open_chat: Callable[..., AppClient], block_len: int) -> None:
    app = open_chat(THOUGHT + ANSWER, THINKING_TEMPLATE, block_len=block_len)
    client = sync_client(app)
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    for completion in (whole, streamed(client, tools=TOOLS)):
        message = completion.choices[0].message
        assert message.reasoning_content == "Hm, é."
        assert (message.content, calls_of(message)) == ("I look:", CALLS)
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT.rstrip().encode())


@pytest.mark.parametrize("prompt_end", ["assistant:<think>\n", "assistant:<think>"])
def test_reasoning_that_the_prompt_begins_is_separated_too(
    open_chat: Callable[..., AppClient], prompt_end: str
) -> None:
    app = open_chat("Hm.\n</think>\n\nHello", THINKING_TEMPLATE, prompt_end=prompt_end)
    body = app.chat().json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm.\n</think>")}
    chunks = events(app.chat(stream=True, stream_options={"include_usage": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert chunks[-1]["usage"] == body["usage"]


def test_a_prompt_that_ends_the_reasoning_leaves_content(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat("Hello", THINKING_TEMPLATE, prompt_end="assistant:<think>\n\n</think>\n\n")
    body = app.chat().json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("max_tokens", range(1, 30))
def test_reasoning_tokens_are_never_more_than_all(open_chat: Callable[..., AppClient], max_tokens: int) -> None:
    """D9: the cap falls in a block of accepted tokens."""
    app = open_chat(THOUGHT + "Hello", THINKING_TEMPLATE, block_len=7)
    usage = app.chat(max_tokens=max_tokens).json()["usage"]
    assert usage["completion_tokens"] == min(max_tokens, len((THOUGHT + "Hello").encode()) + 1)
    in_section = min(max_tokens, len(THOUGHT.rstrip().encode()))
    assert usage["completion_tokens_details"]["reasoning_tokens"] == in_section


def test_reasoning_can_be_left_out_and_is_counted_all_the_same(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(THOUGHT + "Hello", THINKING_TEMPLATE)
    whole = app.chat(include_reasoning=False).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = events(app.chat(include_reasoning=False, stream=True).text)
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello"


@pytest.mark.parametrize(
    ("template", "reasoning_format", "is_separated"),
    [(THINKING_TEMPLATE, "none", False), ("", "think", True), ("", "auto", False), (THINKING_TEMPLATE, "auto", True)],
)
def test_the_reasoning_format_can_be_chosen(
    open_chat: Callable[..., AppClient], template: str, reasoning_format: str, is_separated: bool
) -> None:
    app = open_chat(THOUGHT + "Hello", template, chat=ChatConfig(reasoning_format=reasoning_format))
    body = app.chat().json()
    message = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm, é."}
    assert body["choices"][0]["message"] == (
        message if is_separated else {"role": "assistant", "content": THOUGHT + "Hello"}
    )
    assert ("completion_tokens_details" in body["usage"]) == is_separated


def test_special_tokens_that_mark_reasoning_are_read(open_chat: Callable[..., AppClient]) -> None:
    tokenizer = marked_tokenizer("<think>", "</think>", chat_template=THINKING_TEMPLATE)
    begin, end = (tokenizer.backend.token_to_id(mark) for mark in ("<think>", "</think>"))
    app = open_chat(lambda request: [begin, *b"\nHm.", end, *b"\n\nHello", EOS_ID], "", tokenizer=tokenizer)
    body = app.chat().json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6


def test_text_completions_are_not_read(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(THOUGHT + ANSWER, THINKING_TEMPLATE)
    choice = app.complete(max_tokens=500).json()["choices"][0]
    assert choice["text"] == THOUGHT + ANSWER


def test_arguments_parse_into_the_clients_models(open_chat: Callable[..., AppClient]) -> None:
    app = open_chat(ANSWER, HERMES_TEMPLATE)
    completion = sync_client(app).chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    arguments = completion.choices[0].message.tool_calls[0].function.arguments  # type: ignore[index,union-attr]
    assert Weather.model_validate_json(arguments).city == 'Pa"}ré </tool_call>'
    assert json.loads(arguments) == {"city": 'Pa"}ré </tool_call>'}


# -- with a real engine --------------------------------------------------------------------------------------------

PIECES = [
    *("<think>", "\nH", "m.", "</thi", "nk>\n\nI look", ": <tool", "_call>\n{", '"name": "get_weather", "argum'),
    *('ents": {"ci', 'ty": "Pa', 'ris"}}\n</tool_call>\n<tool_call>{"na', 'me": "now"', "}</tool", "_call>", "<end>"),
]


class PieceTokenizer(WordTokenizer):
    """Every chat is the token 15, after which the target says one piece after the other."""

    chat_template = tool_chat_template = THINKING_TEMPLATE
    takes_tools = True

    def render_chat(self, messages: Any, **options: Any) -> list[int]:
        return [len(PIECES)]


def next_piece(context: tuple[int, ...]) -> Any:
    """Favour the piece after the last one, though not by so much that nothing else is ever sampled."""
    logits = np.zeros(len(PIECES) + 1, dtype=np.float32)
    logits[0 if context[-1] == len(PIECES) else min(context[-1] + 1, len(PIECES) - 1)] = 6.0
    return logits


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("proposer", [None, perfect_proposer(next_piece), random_proposer(len(PIECES) + 1)])
def test_speculation_changes_neither_calls_nor_reasoning_nor_usage(
    open_app: Callable[..., AppClient], proposer: Any, temperature: int
) -> None:
    def open_chat(proposer: Any) -> AppClient:
        engine = make_engine(next_piece, len(PIECES) + 1, proposer=proposer, eos_token_ids=[len(PIECES) - 1])
        engine.tokenizer = PieceTokenizer(len(PIECES) + 1, [*PIECES, "prompt"])  # type: ignore[assignment]
        return open_app(engine)

    def facts(completion: Any) -> list[Any]:
        messages = [choice.message for choice in completion.choices]
        texts = [(message.content, getattr(message, "reasoning_content", None)) for message in messages]
        return [
            texts,
            [calls_of(message) for message in messages],
            completion.usage,
            completion.choices[0].finish_reason,
        ]

    options: dict[str, Any] = {"tools": TOOLS, "temperature": temperature, "seed": 3, "n": 3, "max_tokens": 60}
    plain, drafted = sync_client(open_chat(None)), sync_client(open_chat(proposer))
    expected = facts(plain.chat.completions.create(model="toy", messages=MESSAGES, **options))
    assert facts(drafted.chat.completions.create(model="toy", messages=MESSAGES, **options)) == expected
    assert facts(streamed(drafted, **options, stream_options={"include_usage": True})) == expected
    if temperature == 0:
        assert expected[0][0] == ("I look:", "Hm.")
        assert expected[1][0] == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
        assert expected[3] == "tool_calls"

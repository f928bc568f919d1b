"""What request bodies are accepted, and how the others are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.errors import RequestError
from dspark.request import MAX_SEED
from dspark.serving.protocol import ChatCompletionRequest, CompletionRequest, parse_body
from dspark.serving.tool_choice import callable_tools

NO_DEFAULTS = SimpleNamespace(temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(json.dumps({"model": "toy", "prompt": "hi", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(json.dumps({"model": "toy", "messages": MESSAGES, **fields}).encode(), ChatCompletionRequest)


def refusal(kind: Any = completion, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        kind(**fields).sampling_params(NO_DEFAULTS)
    assert caught.value.status == 400
    return caught.value


# -- bodies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "toy", "prompt": "\\ud800"}',
        b'{"model": "toy", "temperature": NaN}',
        b'{"model": "toy", "temperature": Infinity}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "toy"} {}',
    ],
)
def test_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_body(body, CompletionRequest)


@pytest.mark.parametrize(("body", "kind"), [(b"[]", "an array"), (b'"x"', "a string"), (b"1", "a number")])
def test_body_that_is_not_an_object_is_refused(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError, match=f"must be a JSON object, not {kind}"):
        parse_body(body, CompletionRequest)


def test_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(b'{"model": "toy", "prompt": "a", "temperature": 1e999}', CompletionRequest)
    assert caught.value.param == "temperature"


# -- fields ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], [[]]),
    ],
)
def test_prompt_has_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [None, 1, {}, [True], [1.0], ["a", 1], [[1], "a"], [[True]], [["a"]], [None]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    error = refusal(prompt=prompt)
    assert error.param == "prompt"
    assert "must be a string, a list of strings" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("seed", "7"),
        ("seed", 2**63),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("stream", "true"),
        ("user", 5),
        ("model", None),
        ("return_token_ids", "yes"),
        ("speculation", 3),
        ("presence_penalty", 2.1),
        ("presence_penalty", False),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", "1"),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": "5"}),
        ("logit_bias", [1]),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("bad_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", "no"),
        ("bad_words", [1]),
        ("bad_words", ["x" * 1025]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-2]),
        ("allowed_token_ids", 3),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", "1"),
        ("logprobs", True),
        ("echo", "yes"),
    ],
)
def test_wrong_value_is_refused_naming_the_field(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert name in str(error)


def test_nested_field_is_named_with_its_path() -> None:
    assert refusal(stop_token_ids=[1, "2"]).param == "stop_token_ids[1]"
    assert refusal(speculation={"num_draft_tokens": -1}).param == "speculation.num_draft_tokens"
    assert refusal(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    assert refusal(chat, messages=[{"role": "user"}]).param == "messages[0].content"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert refusal(chat, messages=[{"role": "user", "content": image}]).param.startswith("messages[0].content[0]")


def test_unknown_field_is_refused_with_the_nearest_name() -> None:
    error = refusal(max_token=5)
    assert error.param == "max_token"
    assert "did you mean max_tokens?" in str(error)
    assert refusal(speculation={"k": 1}).param == "speculation.k"
    assert refusal(messages=MESSAGES).param == "messages"


def test_required_fields_are_required() -> None:
    with pytest.raises(RequestError, match="model is missing"):
        parse_body(b'{"prompt": "hi"}', CompletionRequest)
    with pytest.raises(RequestError, match="prompt is missing"):
        parse_body(b'{"model": "toy"}', CompletionRequest)
    assert refusal(chat, messages=[]).param == "messages"


NULLABLE = (
    *("n", "stream", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "user"),
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "bad_token_ids", "bad_words", "allowed_token_ids", "logprobs"),
)


@pytest.mark.parametrize("kind", [completion, chat])
def test_null_means_the_default(kind: Any) -> None:
    request = kind(**dict.fromkeys(NULLABLE), stream_options=None, skip_special_tokens=None, speculation=None)
    assert request == kind()
    assert (request.n, request.stream, request.skip_special_tokens, request.stop) == (1, False, True, ())


@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("use_beam_search", False, 0),
        ("best_of", 1, 2),
        ("suffix", "", "end"),
        ("guided_json", None, {"type": "object"}),
    ],
)
def test_unsupported_field_passes_only_when_it_asks_for_nothing(name: str, neutral: Any, value: Any) -> None:
    assert completion(**{name: neutral}) == completion()
    assert completion(**{name: None}) == completion()
    error = refusal(**{name: value})
    assert error.param == name
    assert "not supported" in str(error)


@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("echo", False, True),
        ("reasoning_effort", None, "low"),
        ("functions", [], [{"name": "f"}]),
        ("function_call", "none", {"name": "f"}),
        ("modalities", ["text"], ["audio"]),
        ("prompt_cache_key", None, "k"),
        ("safety_identifier", None, "ann"),
        ("truncate_prompt_tokens", None, 5),
    ],
)
def test_unsupported_chat_field_passes_only_when_it_asks_for_nothing(name: str, neutral: Any, value: Any) -> None:
    assert chat(**{name: neutral}) == chat()
    assert refusal(chat, **{name: value}).param == name


def test_stream_options_need_a_stream() -> None:
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"


def test_top_logprobs_need_logprobs() -> None:
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert refusal(chat, top_logprobs=2, logprobs=False).param == "top_logprobs"
    assert refusal(chat, top_logprobs=21, logprobs=True).param == "top_logprobs"
    assert refusal(chat, logprobs=2).param == "logprobs"


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    """F3: as many as for the answer, or as `prompt_logprobs` says; where no token is wanted the prompt is scored."""
    wanted = [
        completion(**fields).sampling_params(NO_DEFAULTS).prompt_logprobs
        for fields in (
            {"echo": True, "logprobs": 2},
            {"echo": True, "logprobs": 2, "prompt_logprobs": 4},
            {"prompt_logprobs": 0},
            {"echo": True, "max_tokens": 0},
            {"echo": True},
            {"logprobs": 2},
        )
    ]
    assert wanted == [2, 4, 0, 0, None, None]
    assert chat(prompt_logprobs=3, max_tokens=0).sampling_params(NO_DEFAULTS).prompt_logprobs == 3
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refusal(echo=True, logprobs=21).param == "logprobs"


def test_too_many_completions_in_one_call_are_refused() -> None:
    assert completion(prompt=["a"] * 8, n=128).n == 128
    assert refusal(prompt=["a"] * 9, n=128).param == "prompt"


# -- chats -------------------------------------------------------------------------------------------------


def test_text_parts_are_joined_and_names_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = chat(messages=[{"role": "user", "content": parts, "name": "Ann"}]).messages[0]
    assert message.as_template_input() == {"role": "user", "content": "a\nb", "name": "Ann"}


def test_assistant_message_sent_back_by_a_client_is_accepted() -> None:
    extras = {"refusal": None, "tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    message = chat(messages=[{"role": "assistant", "content": "hi", **extras}]).messages[0]
    assert message.as_template_input() == {"role": "assistant", "content": "hi"}
    error = refusal(chat, messages=[{"role": "assistant", "content": "", "function_call": {"name": "f"}}])
    assert error.param == "messages[0].function_call"


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}


def test_calls_and_their_results_reach_the_template_with_arguments_read() -> None:
    messages = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "index": 1}]},
            {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "assistant", "content": "a", "reasoning": "Hm.", "tool_calls": []},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}], "name": "f"},
        ]
    ).messages
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    assert [message.as_template_input() for message in messages] == [
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "assistant", "content": "a", "reasoning_content": "Hm."},
        {"role": "tool", "content": "5", "name": "f", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "tool", "content": "5"}, "tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}, "reasoning"),
        *(
            (
                {
                    "role": "assistant",
                    "tool_calls": [CALL, {**CALL, "function": {"name": "f", "arguments": arguments}}],
                },
                "tool_calls[1].function.arguments",
            )
            for arguments in ("", "[]", "{", "1", {}, '{"a": ' + "[" * 10_000)
        ),
    ],
)
def test_message_that_makes_no_sense_is_refused(message: dict[str, Any], param: str) -> None:
    assert refusal(chat, messages=[MESSAGES[0], message]).param == f"messages[1].{param}"


# -- tools -------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "description": "It does.", "strict": True}}


def test_template_gets_tools_with_their_parameters_and_without_what_is_not_for_the_model() -> None:
    (tool,) = chat(tools=[TOOL]).tools
    assert tool.as_template_input() == {
        "type": "function",
        "function": {"name": "f", "description": "It does.", "parameters": {"type": "object", "properties": {}}},
    }
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "$defs": {}}
    (tool,) = chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).tools
    assert tool.as_template_input()["function"] == {"name": "f", "parameters": {"type": "object", **schema}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL | {"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": 3, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": 3}}, "tools": [TOOL]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"include_reasoning": "no"}, "include_reasoning"),
    ],
)
def test_wrong_tools_are_refused_naming_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert error.param == param
    assert param in str(error)


def test_tool_fields_that_ask_for_nothing_need_no_tools() -> None:
    for fields in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
        call = chat(**fields)
        assert callable_tools(call.tools, call.tool_choice) == []
    neutral = {"parallel_tool_calls": None, "include_reasoning": None, "tool_choice": None, "tools": None}
    assert chat(**neutral) == chat()


def test_choice_says_which_tools_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]

    def names(**fields: Any) -> list[str]:
        call = chat(tools=tools, **fields)
        return [tool.function.name for tool in callable_tools(call.tools, call.tool_choice)]

    assert names() == names(tool_choice="auto") == names(tool_choice="required") == ["f", "g", "h"]
    assert names(tool_choice="none") == []
    assert names(tool_choice={"type": "function", "function": {"name": "g"}}) == ["g"]


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=7).sampling_params(NO_DEFAULTS).max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).sampling_params(NO_DEFAULTS).max_tokens == 7
    assert refusal(chat, max_completion_tokens=7, max_tokens=8).param == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refusal(max_completion_tokens=7).param == "max_completion_tokens"  # no field of /v1/completions


# -- sampling parameters -----------------------------------------------------------------------------------


def test_every_field_reaches_its_sampling_parameter() -> None:
    params = completion(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        seed=3,
        stop="x",
        stop_token_ids=[2],
        ignore_eos=True,
        min_tokens=1,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        speculation={"num_draft_tokens": 2},
    ).sampling_params(NO_DEFAULTS)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (9, 0.5, 0.9, 4, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids, params.min_tokens) == (3, ("x",), (2,), 1)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (True, True, False)
    assert params.num_draft_tokens == 2


def test_every_change_of_the_logits_reaches_its_sampling_parameter() -> None:
    params = completion(
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": -100, "8": 2.5},
        bad_token_ids=[1],
        allowed_token_ids=[7, 8, 9],
        logprobs=3,
    ).sampling_params(NO_DEFAULTS)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1, 1.2)
    assert (params.logit_bias, params.bad_token_ids) == ({7: -100, 8: 2.5}, (1,))
    assert (params.allowed_token_ids, params.logprobs) == ((7, 8, 9), 3)


def test_log_probabilities_of_a_chat_are_asked_for_in_two_fields() -> None:
    assert chat().sampling_params(NO_DEFAULTS).logprobs is None
    assert chat(logprobs=False, top_logprobs=0).sampling_params(NO_DEFAULTS).logprobs is None
    assert chat(logprobs=True).sampling_params(NO_DEFAULTS).logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling_params(NO_DEFAULTS).logprobs == 5


def test_request_goes_before_the_models_defaults_and_these_before_ours() -> None:
    defaults = SimpleNamespace(temperature=0.6, top_p=0.95, top_k=None, min_p=None, repetition_penalty=1.1)
    params = completion(temperature=0).sampling_params(defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.95, 0, 0.0)
    assert params.repetition_penalty == 1.1
    assert completion(repetition_penalty=1).sampling_params(defaults).repetition_penalty == 1


def test_default_max_tokens_yields_to_the_request() -> None:
    assert completion().sampling_params(NO_DEFAULTS, default_max_tokens=16).max_tokens == 16
    assert completion(max_tokens=5).sampling_params(NO_DEFAULTS, default_max_tokens=16).max_tokens == 5
    assert chat().sampling_params(NO_DEFAULTS).max_tokens is None


def test_choices_of_a_seeded_request_have_seeds_of_their_own() -> None:
    request = completion(seed=5, n=4)
    seeds = [request.sampling_params(NO_DEFAULTS, choice=i).seed for i in range(4)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in seeds)
    assert seeds == [request.sampling_params(NO_DEFAULTS, choice=i).seed for i in range(4)]
    assert set(seeds[1:]).isdisjoint(
        completion(seed=6, n=4).sampling_params(NO_DEFAULTS, choice=i).seed for i in range(4)
    )


def test_unseeded_choices_stay_unseeded() -> None:
    assert completion(n=2).sampling_params(NO_DEFAULTS, choice=1).seed is None

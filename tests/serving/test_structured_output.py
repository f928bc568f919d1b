"""Structured answers over HTTP: the fields, what is refused, and the official client with pydantic models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from byte_tokenizers import EOS_ID, byte_level_backend
from fake_engine import FakeEngine
from pydantic import BaseModel, Field
from sse import events
from structure_cases import engine_over_words
from tiny_models import make_model
from toys import hashed_rule, random_proposer

from dspark.config import BatchingConfig, EngineConfig
from dspark.engine.build import load_engine
from dspark.structure import Structure

WORDS = ["a", "b", "c", "1", "2", "{", "}", '"', ":", '"a"', " ", "<end>"]
RULE = hashed_rule(len(WORDS))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def app(open_app: Callable[..., Any]) -> Any:
    return open_app(engine_over_words(WORDS, RULE, proposer=random_proposer(len(WORDS))))


# -- fields --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, Structure.json_object()),
        ({"response_format": FORMAT}, Structure.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, Structure.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structure.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": True}}, Structure.json_schema(True)),
        ({"structured_outputs": {"json_object": True}}, Structure.json_object()),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, Structure.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structure.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"', "regex": None}}, Structure.grammar('root ::= "a"')),
    ],
)
def test_the_fields_say_which_structure(open_app: Callable[..., Any], fields: Any, structure: Any) -> None:
    app = open_app(FakeEngine())
    assert app.complete(**fields).status_code == 200
    assert app.chat(**fields, n=2, max_tokens=4).status_code == 200
    assert [request.sampling.structure for request in app.engine.seen] == [structure] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": FORMAT["json_schema"]}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
         "response_format.json_schema.schema"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "z"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs.json"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_a_400_that_names_the_field(app: Any, fields: Any, param: str, stream: bool) -> None:
    response = app.complete(prompt=[1, 2], stream=stream, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert param in response.json()["error"]["message"]
    assert app.complete(prompt=[1, 2], max_tokens=3).status_code == 200


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_choices_have_the_structure_and_the_text_of_whole_ones(
    app: Any, open_app: Callable[..., Any], temperature: float
) -> None:
    """K4: each choice has a place of its own in the structure."""
    body = {
        "prompt": [1, 2],
        "n": 4,
        "seed": 3,
        "temperature": temperature,
        "max_tokens": 40,
        "response_format": FORMAT,
    }
    choices = app.complete(**body).json()["choices"]
    assert open_app(engine_over_words(WORDS, RULE)).complete(**body).json()["choices"] == choices
    assert len({choice["text"] for choice in choices}) == (4 if temperature else 1)
    assert all(isinstance(json.loads(choice["text"])["a"], int) for choice in choices)
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    chunks = [chunk["choices"][0] for chunk in events(app.complete(**body, stream=True).text)]
    for choice in choices:
        assert "".join(chunk["text"] for chunk in chunks if chunk["index"] == choice["index"]) == choice["text"]


def test_a_structure_that_leads_nowhere_is_the_requests_fault(app: Any) -> None:
    """After "ab" only c may come, which is banned; a stream has begun by then and ends with the error."""
    body = {"prompt": [1], "structured_outputs": {"regex": "(ab|b)c"}, "bad_token_ids": [2], "max_tokens": 8}
    response = app.complete(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs.regex"
    last = events(app.complete(**body, stream=True).text)[-1]
    assert (last["error"]["type"], last["error"]["param"]) == ("invalid_request_error", "structured_outputs.regex")
    assert app.get("/health").status_code == 200
    assert app.engine.allocator.num_used == 0


# -- the official client -------------------------------------------------------------------------------------------


class Step(BaseModel):
    kind: Literal["add", "take"]
    amount: int = Field(ge=0, le=99)


class Plan(BaseModel):
    name: str = Field(max_length=6)
    steps: list[Step] = Field(min_length=1, max_length=2)


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Llama over bytes, with a chat template, which drafts by n-gram."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model(
        "llama", vocab_size=byte_level_backend().get_vocab_size(), eos_token_id=EOS_ID, max_position_embeddings=512
    ).save_pretrained(folder)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    template = "{% for message in messages %}{{ message.role }}:{{ message.content }}<end>{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<eos>"}))
    return load_engine(EngineConfig(model=str(folder), drafter="ngram", batching=BatchingConfig(max_size=4)))


@pytest.fixture
def client(tiny_engine: Any, open_app: Callable[..., Any]) -> Any:
    app = open_app(tiny_engine)
    app.openai = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=app.http, max_retries=0)
    return app


MESSAGES: Any = [{"role": "user", "content": "plan"}]
COMPACT = {"extra_body": {"seed": 5}, "temperature": 1.0, "max_tokens": 300}


def test_the_official_client_parses_into_pydantic_models(client: Any, tiny_engine: Any) -> None:
    completion = client.run(
        client.openai.chat.completions.parse(
            model=tiny_engine.model_name, messages=MESSAGES, response_format=Plan, **COMPACT
        )
    )
    message = completion.choices[0].message
    assert isinstance(message.parsed, Plan)
    assert Plan.model_validate_json(message.content) == message.parsed
    assert completion.choices[0].finish_reason == "stop"


def test_the_official_client_streams_pydantic_models(client: Any, tiny_engine: Any) -> None:
    async def streamed() -> Any:
        arguments = {"model": tiny_engine.model_name, "messages": MESSAGES, "response_format": Plan, **COMPACT}
        async with client.openai.chat.completions.stream(**arguments) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_completion()

    kinds, final = client.run(streamed())
    assert isinstance(final.choices[0].message.parsed, Plan)
    assert {"content.delta", "content.done"} <= set(kinds)
    whole = client.run(
        client.openai.chat.completions.parse(
            model=tiny_engine.model_name, messages=MESSAGES, response_format=Plan, **COMPACT
        )
    )
    assert whole.choices[0].message.content == final.choices[0].message.content


def test_the_official_client_asks_for_extensions_and_hears_of_bad_ones(client: Any, tiny_engine: Any) -> None:
    def ask(structured_outputs: Any) -> Any:
        return client.run(
            client.openai.completions.create(
                model=tiny_engine.model_name, prompt="x", extra_body={"structured_outputs": structured_outputs}
            )
        )

    assert re.fullmatch("[0-9]{3}-[xyz]", ask({"regex": "[0-9]{3}-[xyz]"}).choices[0].text)
    assert ask({"choice": ["yes", "no"]}).choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as caught:
        ask({"regex": "a(("})
    assert caught.value.param == "structured_outputs.regex"

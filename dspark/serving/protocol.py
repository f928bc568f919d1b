"""Bodies of /v1/completions and /v1/chat/completions: what is accepted, with which type, and what is refused.

Types are strict and unknown fields are errors. Fields of the OpenAI API that are not supported pass only with the
value that asks for nothing. Ranges are checked where the values are used, in `SamplingParams` and by the engine.
"""

from __future__ import annotations

import difflib
import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError, from_json

from dspark.errors import RequestError
from dspark.request import MAX_SEED, MAX_STOP_STRING_LEN, MAX_TOP_LOGPROBS, SamplingParams
from dspark.serving.chat_messages import STRICT, ChatMessage
from dspark.serving.structured_output import StructureFields
from dspark.serving.tool_choice import MAX_TOOLS, Tool, ToolChoice, callable_tools
from dspark.serving.unsupported_fields import NEUTRAL_CHAT, NEUTRAL_COMPLETION, drop_neutral
from dspark.structure import Structure

MAX_CHOICES = 128  # `n`, the OpenAI API's limit
MAX_SEQUENCES = 1024  # choices of one call: prompts times n
DEFAULT_COMPLETION_MAX_TOKENS = 16  # the OpenAI API's default for /v1/completions; chats run to the context end

_SAMPLING_VALUES = (
    *("stop", "stop_token_ids", "min_tokens", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "bad_token_ids", "allowed_token_ids"),
)
_SAMPLING_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")

# For kinds of errors whose own text speaks of Python.
_IN_JSON_WORDS = {
    "too_short": "must not be empty",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
}
MAX_SHOWN_PATH = 100
MAX_TOKEN_ID_DIGITS = 18


class SamplingDefaults(Protocol):
    """The model's own sampling defaults; None where it has none."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...


class _Model(BaseModel):
    model_config = STRICT


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of the four forms the API allows as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if _is_list_of(value, int):
            return [value]
        if value and (_is_list_of(value, str) or all(isinstance(p, list) and _is_list_of(p, int) for p in value)):
            return value
    raise PydanticCustomError(
        "prompt",
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    )


def _is_list_of(items: list[Any], kind: type) -> bool:
    return all(type(item) is kind for item in items)  # type() because a bool is an int to isinstance


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and _is_list_of(value, str):
        return tuple(value)
    raise PydanticCustomError("stop", "must be a string or a list of strings")


def _bad_words(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list) and _is_list_of(value, str) and all(0 < len(w) <= MAX_STOP_STRING_LEN for w in value):
        return value
    raise PydanticCustomError("bad_words", f"must be a list of strings of 1 to {MAX_STOP_STRING_LEN} characters")


def _logit_bias(value: Any) -> dict[int, float]:
    """Read the ids, which JSON can only write as text, as numbers."""
    if value is None:
        return {}
    if isinstance(value, dict) and all(_is_token_id(key) and type(bias) in (int, float) for key, bias in value.items()):
        return {int(key): bias for key, bias in value.items()}
    raise PydanticCustomError("logit_bias", "must be an object of numbers by token id")


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_ID_DIGITS


def _or_default(default: Any) -> BeforeValidator:
    """Read null as the default, as the API does."""
    return BeforeValidator(lambda value: default if value is None else value)


class StreamOptions(_Model):
    """`stream_options`."""

    include_usage: Annotated[bool, _or_default(False)] = False  # one last chunk without choices carries the usage
    continuous_usage_stats: Annotated[bool, _or_default(False)] = False  # every chunk carries the usage so far


class SpeculationOptions(_Model):
    """`speculation`: this request's own limits."""

    num_draft_tokens: int | None = None  # at most this many drafted tokens a round; 0 is plain decoding


class _GenerationRequest(StructureFields, _Model):
    """The fields both endpoints share."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: Annotated[float, _or_default(0.0)] = 0.0
    frequency_penalty: Annotated[float, _or_default(0.0)] = 0.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias)] = {}
    bad_token_ids: Annotated[list[int], _or_default([])] = []
    bad_words: Annotated[list[str], PlainValidator(_bad_words)] = []
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None  # log-probabilities of the prompt with so many of the likeliest tokens
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    stop_token_ids: Annotated[list[int], _or_default([])] = []
    ignore_eos: Annotated[bool, _or_default(False)] = False
    min_tokens: Annotated[int, _or_default(0)] = 0
    include_stop_str_in_output: Annotated[bool, _or_default(False)] = False
    skip_special_tokens: Annotated[bool, _or_default(True)] = True
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _or_default(1)] = 1
    stream: Annotated[bool, _or_default(False)] = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # of no effect, as the API has it
    speculation: SpeculationOptions | None = None
    return_token_ids: Annotated[bool, _or_default(False)] = False
    return_token_origins: Annotated[bool, _or_default(False)] = False  # `token_origins` of each choice
    return_speculation_stats: Annotated[bool, _or_default(False)] = False  # `metrics.speculative_decoding`

    def check(self) -> None:
        """Raise `RequestError` when fields contradict each other."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only for streams; leave it out or set stream to true", param="stream_options"
            )

    @property
    def token_limit(self) -> int | None:
        """How many tokens the client allows; None when it does not say."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens go with every token's own log-probability; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens go with every prompt token's own log-probability; None: none are wanted."""
        return self.prompt_logprobs

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_params(
        self,
        defaults: SamplingDefaults,
        *,
        choice: int = 0,
        default_max_tokens: int | None = None,
        bad_token_sequences: Sequence[Sequence[int]] = (),
        kept_token_ids: Sequence[int] = (),
        structure: Structure | None = None,
    ) -> SamplingParams:
        """Return the parameters of one choice: the request's, else the model's defaults, else our own.

        `bad_token_sequences` are the tokens of its bad words, `kept_token_ids` the special ones that mark up answers;
        `structure` is the form of the whole text, None: what the fields themselves ask for.
        Choices of a seeded request get seeds of their own; choice 0 gets the request's. Raises `RequestError`.
        """
        values: dict[str, Any] = {
            "seed": _choice_seed(self.seed, choice),
            "max_tokens": default_max_tokens if self.token_limit is None else self.token_limit,
            "num_draft_tokens": self.speculation.num_draft_tokens if self.speculation else None,
            "logprobs": self.num_top_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
            "bad_token_sequences": bad_token_sequences,
            "kept_token_ids": kept_token_ids,
        }
        for name in (*_SAMPLING_VALUES, *_SAMPLING_FLAGS):
            values[name] = getattr(self, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            value = getattr(defaults, name) if value is None else value
            if value is not None:
                values[name] = value
        try:
            return SamplingParams(**values, structure=structure or self.structure())
        except RequestError as error:
            raise self.in_wire_names(error) from error

    def in_wire_names(self, error: RequestError) -> RequestError:
        """Return an error that names a sampling parameter as one that names the field it came from."""
        wire_name = self.wire_names.get(error.param or "", error.param)
        message = str(error).replace(str(error.param), str(wire_name), 1)
        return RequestError(message, param=wire_name, code=error.code, status=error.status)

    @property
    def wire_names(self) -> dict[str, str]:
        """Names of fields, by the sampling parameter that they set, where the two differ."""
        return {
            "num_draft_tokens": "speculation.num_draft_tokens",
            "bad_token_sequences": "bad_words",
            "structure": self.structure_name,
        }


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions."""

    neutral = NEUTRAL_COMPLETION

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = None  # how many of the likeliest tokens to list
    echo: Annotated[bool, _or_default(False)] = False  # the prompt begins the text and the log-probabilities

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs]
        if self.echo:
            # Nothing but the prompt is asked for where no token is wanted: it is scored whether that is shown or not.
            wanted += [self.logprobs, 0 if self.max_tokens == 0 else None]
        return max((num for num in wanted if num is not None), default=None)

    def check(self) -> None:
        super().check()
        if len(self.prompt) * self.n > MAX_SEQUENCES:
            raise RequestError(
                f"{len(self.prompt)} prompts with n {self.n} are more than {MAX_SEQUENCES} completions; send fewer",
                param="prompt",
            )


class ChatCompletionRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral = NEUTRAL_CHAT

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    add_generation_prompt: Annotated[bool, _or_default(True)] = True
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: Annotated[bool, _or_default(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _or_default(0)] = 0
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), _or_default([])] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, _or_default(True)] = True  # False: the answer ends with its first call
    include_reasoning: Annotated[bool, _or_default(True)] = True

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def structure_name(self) -> str:
        return "tools" if self.tools and self.structure() is None else super().structure_name

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wire_names(self) -> dict[str, str]:
        names = super().wire_names
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        callable_tools(self.tools, self.tool_choice)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs ({self.top_logprobs}) needs logprobs; set logprobs to true", param="top_logprobs"
            )
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                f"max_tokens ({old}) and max_completion_tokens ({new}) differ; send one of them",
                param="max_completion_tokens",
            )


RequestT = TypeVar("RequestT", bound=_GenerationRequest)


def parse_body(body: bytes, kind: type[RequestT]) -> RequestT:
    """Read a request body. Raises `RequestError` naming the first field that is wrong."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"the body must be a JSON object, not {_json_type(fields)}")
    drop_neutral(fields, kind.neutral)
    messages = fields.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                drop_neutral(message, ChatMessage.neutral, prefix=f"messages[{index}].")
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _request_error(error, kind) from error
    request.check()
    return request


def _request_error(error: ValidationError, kind: type[_GenerationRequest]) -> RequestError:
    """Say in our words which field is wrong; of several readings of a field the one that went furthest."""
    details = max(error.errors(include_url=False, include_context=False), key=lambda e: len(e["loc"]))
    where = _path(details["loc"])
    if details["type"] == "extra_forbidden":
        name, is_nested = str(details["loc"][-1]), len(details["loc"]) > 1
        near = [] if is_nested else difflib.get_close_matches(name, kind.model_fields, n=1)
        return RequestError(
            f"unknown field {where}; {f'did you mean {near[0]}?' if near else 'leave it out'}", param=where
        )
    if details["type"] == "missing":
        return RequestError(f"{where} is missing; it is required", param=where)
    message = _IN_JSON_WORDS.get(details["type"]) or details["msg"].removeprefix("Input ")
    return RequestError(f"{where} ({_short(details['input'])}) {message[:1].lower()}{message[1:]}", param=where)


def _path(location: tuple[int | str, ...]) -> str:
    """Write a location as `messages[0].content`, without the names of union branches."""
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "NamedTool"):
            path += f".{part}"
    return path if len(path) <= MAX_SHOWN_PATH else f"{path[:MAX_SHOWN_PATH]}..."


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _choice_seed(seed: int | None, choice: int) -> int | None:
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED

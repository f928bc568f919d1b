"""Bodies of answers: completions and chat completions, whole or as server-sent events, and errors.

One call has one or more choices, each a request of its own; an engine output says by request id whose it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.errors import RequestError
from dspark.request import Request, RequestOutput, SpeculationStats, TokenLogprobs, TokenOrigin
from dspark.serving.chat_deltas import delta, message
from dspark.serving.chat_dialect import AnswerReader, ChatPart
from dspark.serving.logprobs import HasSpecialTokens, LogprobsWriter, prompt_logprobs_fields
from dspark.serving.protocol import ChatCompletionRequest, CompletionRequest
from dspark.serving.reasoning import Content
from dspark.serving.speculation_stats import speculation_fields

DONE_EVENT = b"data: [DONE]\n\n"

# Legal inside JSON strings, but line ends to the splitlines that some clients cut event streams with.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


@dataclass(kw_only=True)
class _Choice:
    """What one choice has got so far."""

    index: int
    prompt_token_ids: Sequence[int]
    echo: str | None  # comes before its text
    reader: AnswerReader | None = None  # None: the text is the content
    texts: list[str] = field(default_factory=list)
    parts: list[ChatPart] = field(default_factory=list)  # of a chat whose text is read
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    token_origins: list[TokenOrigin] = field(default_factory=list)
    logprobs_writer: LogprobsWriter
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    is_begun: bool = False  # a chunk of it has been sent


class Answer:
    """The answer to one call, built from the outputs of `requests`, which are in the order of the choices.

    `echoes` are texts that begin the choices: the prompts, where the call wants them back. `readers` read the choices'
    texts; without one a text is the content.
    """

    def __init__(
        self,
        call: CompletionRequest | ChatCompletionRequest,
        requests: Sequence[Request],
        *,
        answer_id: str,
        tokenizer: HasSpecialTokens,
        echoes: Sequence[str] = (),
        readers: Sequence[AnswerReader | None] = (),
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._is_chat = isinstance(call, ChatCompletionRequest)
        self._id = answer_id
        self._created = int(time.time())
        self._choices = {
            request.request_id: _Choice(
                index=index,
                prompt_token_ids=request.prompt_token_ids,
                echo=echoes[index] if echoes else None,
                reader=readers[index] if readers else None,
                logprobs_writer=LogprobsWriter(
                    tokenizer,
                    is_chat=self._is_chat,
                    echo=echoes[index] if echoes else "",
                    skips_special_tokens=call.skip_special_tokens,
                ),
            )
            for index, request in enumerate(requests)
        }

    def add(self, output: RequestOutput) -> list[ChatPart]:
        """Take in one output of the engine; return the parts of a chat's answer that it settles."""
        choice = self._choices[output.request_id]
        choice.texts.append(output.text)
        choice.token_ids.extend(output.token_ids)
        choice.logprobs.extend(output.logprobs or ())
        choice.prompt_logprobs = output.prompt_logprobs or choice.prompt_logprobs
        choice.token_origins.extend(output.token_origins)
        choice.num_cached_tokens, choice.speculation = output.num_cached_tokens, output.speculation
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        if choice.reader is None:
            return [Content(output.text)] if output.text else []
        parts = choice.reader.push(output.text, output.token_ids, is_last=output.finish_reason is not None)
        choice.parts += parts
        choice.finish_reason = choice.reader.finish_reason(output.finish_reason)
        return parts

    def body(self) -> bytes:
        """Return the whole answer."""
        choices = []
        for choice in self._choices.values():
            text = (choice.echo or "") + "".join(choice.texts)
            parts = [Content(text)] if choice.reader is None else choice.parts
            content = {"message": message(parts)} if self._is_chat else {"text": text}
            fields = self._choice_fields(choice, content, choice.token_ids, choice.logprobs, has_prompt=True)
            choices.append(fields | self._origin_fields(choice.token_origins))
        name = "chat.completion" if self._is_chat else "text_completion"
        body = {**self._head(name), "choices": choices, "usage": self._usage(), **self._metrics()}
        if self._is_chat:  # the choices of a chat share its prompt
            body |= self._prompt_logprobs(next(iter(self._choices.values())))
        return to_json(body)

    def events(self, output: RequestOutput) -> Iterator[bytes]:
        """Take in one output and return its events, one for each part; none when it has nothing that was asked for."""
        choice = self._choices[output.request_id]
        parts: Sequence[ChatPart | None] = self.add(output)
        wants_tokens = self._call.return_token_ids or self._call.return_token_origins
        wants_tokens = wants_tokens or self._call.has_continuous_usage or output.logprobs is not None
        has_tokens = (output.token_ids and wants_tokens) or output.prompt_logprobs is not None
        if not parts and (has_tokens or output.finish_reason is not None):
            parts = [Content("") if choice.reader is None else None]
        for index, part in enumerate(parts):
            yield to_event(self._chunk(choice, part, output, is_first=index == 0, is_last=index == len(parts) - 1))

    def last_events(self) -> Iterator[bytes]:
        """Return what ends a stream without errors."""
        usage = {"usage": self._usage()} if self._call.includes_usage else {}
        last = {**usage, **self._metrics()}
        if last:
            yield to_event({**self._head(self._chunk_name), "choices": [], **last})
        yield DONE_EVENT

    def error_fields(self, failure: Exception) -> dict[str, Any]:
        """Return what ends a stream that failed, by the request's own fault or not."""
        if not isinstance(failure, RequestError):
            return error_fields(str(failure), status=500)
        error = self._call.in_wire_names(failure)
        return error_fields(str(error), status=error.status, param=error.param, code=error.code)

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(
        self, choice: _Choice, part: ChatPart | None, output: RequestOutput, *, is_first: bool, is_last: bool
    ) -> dict[str, Any]:
        """Return the chunk of one part of an output; the first one has its tokens, the last one its end."""
        begins, choice.is_begun = not choice.is_begun, True
        if self._is_chat:
            role = {"role": "assistant"} if begins else {}
            content: dict[str, Any] = {"delta": {**role, **({} if part is None else delta(part))}}
        else:
            content = {"text": (choice.echo or "") + output.text if begins else output.text}
        token_ids, logprobs = (output.token_ids, output.logprobs or ()) if is_first else ((), ())
        fields = self._choice_fields(choice, content, token_ids, logprobs, has_prompt=begins)
        fields |= self._origin_fields(output.token_origins if is_first else ())
        if not is_last:
            fields |= {"finish_reason": None, "stop_reason": None}
        chunk = {**self._head(self._chunk_name), "choices": [fields]}
        if self._is_chat and begins and choice.index == 0:
            chunk |= self._prompt_logprobs(choice)
        if self._call.has_continuous_usage:
            chunk["usage"] = self._usage()
        elif self._call.includes_usage:
            chunk["usage"] = None  # clients that asked for the usage find the field in every chunk
        return chunk

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._call.model}

    def _choice_fields(
        self,
        choice: _Choice,
        content: dict[str, Any],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        has_prompt: bool,
    ) -> dict[str, Any]:
        fields = {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(choice, logprobs, has_prompt=has_prompt),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._call.return_token_ids:
            fields["token_ids"] = list(token_ids)
            if has_prompt:
                fields["prompt_token_ids"] = list(choice.prompt_token_ids)
        if has_prompt and not self._is_chat:
            fields |= self._prompt_logprobs(choice)
        return fields

    def _logprobs(
        self, choice: _Choice, logprobs: Sequence[TokenLogprobs], *, has_prompt: bool
    ) -> dict[str, Any] | None:
        num_top = self._call.num_top_logprobs
        if num_top is None:
            return None
        fields = choice.logprobs_writer.write(logprobs)
        if not has_prompt or choice.echo is None or choice.prompt_logprobs is None:  # None: aborted before
            return fields
        echoed = choice.logprobs_writer.write_echo(choice.prompt_token_ids, choice.prompt_logprobs, num_top)
        return {name: echoed[name] + values for name, values in fields.items()}

    def _prompt_logprobs(self, choice: _Choice) -> dict[str, Any]:
        num_top, entries = self._call.prompt_logprobs, choice.prompt_logprobs
        if num_top is None or entries is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs_fields(self._tokenizer, entries, num_top)}

    def _origin_fields(self, origins: Sequence[TokenOrigin]) -> dict[str, Any]:
        if not self._call.return_token_origins:
            return {}
        return {"token_origins": [{"kind": origin.kind, "proposer": origin.proposer} for origin in origins]}

    def _metrics(self) -> dict[str, Any]:
        """Return how drafting went in all choices together, for a call that wants to know."""
        if not self._call.return_speculation_stats:
            return {}
        total = SpeculationStats()
        for choice in self._choices.values():
            total = total.plus(choice.speculation)
        return {"metrics": {"speculative_decoding": speculation_fields(total)}}

    def _usage(self) -> dict[str, Any]:
        """Count the tokens so far; the n choices of a prompt share it, so it counts once."""
        choices = list(self._choices.values())
        num_prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices[:: self._call.n])
        num_cached_tokens = sum(choice.num_cached_tokens for choice in choices[:: self._call.n])
        num_completion_tokens = sum(len(choice.token_ids) for choice in choices)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }
        counts = [choice.reader.num_reasoning_tokens for choice in choices if choice.reader is not None]
        if counts and counts[0] is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(count or 0 for count in counts)}
        return usage


def error_fields(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the error object of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_json(fields: dict[str, Any]) -> bytes:
    """Write compact JSON in UTF-8 that no reader of lines takes apart."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPED).encode()


def to_event(fields: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + to_json(fields) + b"\n\n"

"""Bodies of answers: completions and chat completions, whole or as server-sent events, and errors.

One call has one or more choices, each a request of its own; an engine output says by request id whose it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.engine.detokenizer import HasBackend
from dspark.request import FinishReason, Request, RequestOutput, SpeculationStats, TokenLogprobs, TokenOrigin
from dspark.serving.logprobs import LogprobsWriter
from dspark.serving.protocol import ChatCompletionRequest, CompletionRequest
from dspark.serving.speculation_stats import speculation_fields

DONE_EVENT = b"data: [DONE]\n\n"

# Legal inside JSON strings, but line ends to the splitlines that some clients cut event streams with.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


@dataclass(kw_only=True)
class _Choice:
    """What one choice has got so far."""

    index: int
    prompt_token_ids: Sequence[int]
    echo: str  # comes before its text
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_origins: list[TokenOrigin] = field(default_factory=list)
    logprobs_writer: LogprobsWriter
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    is_begun: bool = False  # a chunk of it has been sent


class Answer:
    """The answer to one call, built from the outputs of `requests`, which are in the order of the choices.

    `echoes` are texts that begin the choices: the prompts, where the call wants them back.
    """

    def __init__(
        self,
        call: CompletionRequest | ChatCompletionRequest,
        requests: Sequence[Request],
        *,
        answer_id: str,
        tokenizer: HasBackend,
        echoes: Sequence[str] = (),
    ) -> None:
        self._call = call
        self._is_chat = isinstance(call, ChatCompletionRequest)
        self._id = answer_id
        self._created = int(time.time())
        self._choices = {
            request.request_id: _Choice(
                index=index,
                prompt_token_ids=request.prompt_token_ids,
                echo=echoes[index] if echoes else "",
                logprobs_writer=LogprobsWriter(tokenizer, is_chat=self._is_chat),
            )
            for index, request in enumerate(requests)
        }

    def add(self, output: RequestOutput) -> None:
        """Take in one output of the engine."""
        choice = self._choices[output.request_id]
        choice.texts.append(output.text)
        choice.token_ids.extend(output.token_ids)
        choice.logprobs.extend(output.logprobs or ())
        choice.token_origins.extend(output.token_origins)
        choice.num_cached_tokens, choice.speculation = output.num_cached_tokens, output.speculation
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason

    def body(self) -> bytes:
        """Return the whole answer."""
        choices = []
        for choice in self._choices.values():
            text = choice.echo + "".join(choice.texts)
            content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            fields = self._choice_fields(choice, content, choice.token_ids, choice.logprobs, has_prompt=True)
            choices.append(fields | self._origin_fields(choice.token_origins))
        name = "chat.completion" if self._is_chat else "text_completion"
        return to_json({**self._head(name), "choices": choices, "usage": self._usage(), **self._metrics()})

    def events(self, output: RequestOutput) -> Iterator[bytes]:
        """Take in one output and return its event; none when it holds nothing that the client asked for."""
        self.add(output)
        wants_tokens = self._call.return_token_ids or self._call.return_token_origins
        wants_tokens = wants_tokens or self._call.has_continuous_usage or output.logprobs is not None
        has_tokens = output.token_ids and wants_tokens
        if output.text or has_tokens or output.finish_reason is not None:
            yield to_event(self._chunk(self._choices[output.request_id], output))

    def last_events(self) -> Iterator[bytes]:
        """Return what ends a stream without errors."""
        usage = {"usage": self._usage()} if self._call.includes_usage else {}
        last = {**usage, **self._metrics()}
        if last:
            yield to_event({**self._head(self._chunk_name), "choices": [], **last})
        yield DONE_EVENT

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, choice: _Choice, output: RequestOutput) -> dict[str, Any]:
        is_first, choice.is_begun = not choice.is_begun, True
        content: dict[str, Any] = {"text": choice.echo + output.text if is_first else output.text}
        if self._is_chat:
            role = {"role": "assistant"} if is_first else {}
            content = {"delta": {**role, "content": output.text}}
        fields = self._choice_fields(choice, content, output.token_ids, output.logprobs or (), has_prompt=is_first)
        fields |= self._origin_fields(output.token_origins)
        chunk = {**self._head(self._chunk_name), "choices": [fields]}
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
        has_logprobs = self._call.num_top_logprobs is not None
        fields = {
            "index": choice.index,
            **content,
            "logprobs": choice.logprobs_writer.write(logprobs) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._call.return_token_ids:
            fields["token_ids"] = list(token_ids)
            if has_prompt:
                fields["prompt_token_ids"] = list(choice.prompt_token_ids)
        return fields

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
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }


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
